"""The gate opens only after consecutive small batches and closes at the first large one."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_tlt.speculation.gate import ElasticGate

batches = st.lists(st.integers(0, 40), max_size=80)


@given(batches, st.integers(1, 20), st.integers(1, 5), st.integers(0, 6))
def test_it_never_flaps(sizes: list[int], threshold: int, patience: int, hysteresis: int) -> None:
    gate = ElasticGate(threshold, patience, hysteresis)
    answers = [gate.update(size) for size in sizes]
    for i, (before, after) in enumerate(pairwise([False, *answers])):
        calm = sizes[max(0, i - patience + 1) : i + 1]
        enough = len(calm) == patience and max(calm) <= threshold
        if not before:
            assert after == enough, "on exactly after so many small batches in a row"
        else:
            assert after == (sizes[i] <= threshold + hysteresis), "off at once, but for nothing in between"
    opened = [i for i, (a, b) in enumerate(pairwise([False, *answers])) if not a and b]
    closed = [i for i, (a, b) in enumerate(pairwise([False, *answers])) if a and not b]
    for end, start in zip(closed, opened[1:], strict=False):
        assert start - end >= patience


@given(batches, batches)
def test_a_loaded_state_continues(before: list[int], after: list[int]) -> None:
    gate, other = ElasticGate(16, 3, 2), ElasticGate(16, 3, 2)
    for size in before:
        gate.update(size)
    other.load_state(gate.state())
    assert [gate.update(size) for size in after] == [other.update(size) for size in after]


def test_a_new_rollout_starts_closed() -> None:
    gate = ElasticGate(8, patience=2)
    gate.update(1)
    assert gate.update(1) and gate.is_open
    gate.reset()
    assert not gate.is_open and not gate.update(1)


@pytest.mark.parametrize("wrong", [{"threshold": 0}, {"patience": 0}, {"hysteresis": -1}])
def test_invalid_options_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=rf"{next(iter(wrong))} is .*allowed"):
        ElasticGate(**wrong)
    with pytest.raises(ValueError, match="batch is -1"):
        ElasticGate().update(-1)


@given(batches, st.integers(1, 20), st.integers(0, 6))
def test_it_is_never_open_above_its_largest_batch(sizes: list[int], threshold: int, hysteresis: int) -> None:
    gate = ElasticGate(threshold, 1, hysteresis)
    opened = [size for size in sizes if gate.update(size)]
    assert max(opened, default=0) <= gate.max_batch
    gate.update(0)
    assert gate.update(gate.max_batch)

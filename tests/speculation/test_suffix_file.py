"""The file of the suffix drafter: saved, loaded, damaged."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_tlt.config.speculation import SuffixConfig
from megatron_tlt.errors import RunError
from megatron_tlt.speculation.suffix import SuffixDrafter
from megatron_tlt.speculation.token_drafter import FinishedResponse
from tests.speculation.suffix_requests import EAGER_KEYS, draft, held_bytes, visit


def filled(seed: int = 0) -> SuffixDrafter:
    drafter, rng = SuffixDrafter(SuffixConfig(window=4, **EAGER_KEYS)), random.Random(seed)
    for rollout in range(3):
        problems = [f"problem {i}" for i in range(3) if i <= rollout for _ in range(2)]
        visit(drafter, *((problem, [rng.randrange(4) for _ in range(30)]) for problem in problems))
    return drafter


def contents(drafter: SuffixDrafter) -> list[tuple[str, int, list[int]]]:
    return [(stored.problem, stored.visit, stored.tokens.tolist()) for stored in drafter._store]


def test_it_reloads_from_its_file(tmp_path: Path) -> None:
    drafter = filled()
    drafter.learn("problem 0", [1, 2], [3, 3, 3])  # of an unfinished rollout, whose step is decoded again
    drafter.save(tmp_path / "suffix.bin")
    drafter.end_rollout([])
    restored = SuffixDrafter(drafter.config)
    restored.load(tmp_path / "suffix.bin")
    assert contents(restored) == contents(drafter)
    assert restored.memory_bytes == held_bytes(restored) < drafter.memory_bytes
    rng = random.Random(5)
    for number in range(40):
        problem, context = f"problem {rng.randrange(4)}", [rng.randrange(4) for _ in range(6)]
        assert draft(restored, problem, context) == draft(drafter, problem, context)
        if number % 10 == 9:
            for one in (restored, drafter):
                one.end_rollout([FinishedResponse(problem, (1, 2), context)])
    assert contents(restored) == contents(drafter)
    assert [path.name for path in tmp_path.iterdir()] == ["suffix.bin"]


def test_a_file_is_loaded_under_another_window_and_scope(tmp_path: Path) -> None:
    drafter = filled()
    drafter.save(tmp_path / "suffix.bin")
    narrow = SuffixDrafter(drafter.config.model_copy(update={"window": 1, "scope": "global"}))
    narrow.load(tmp_path / "suffix.bin")
    assert [(problem, visit) for problem, visit, _ in contents(narrow)] == [
        (f"problem {i}", 3 - i) for i in range(3) for _ in range(2)
    ]


DAMAGE = st.one_of(
    st.tuples(st.just("cut"), st.floats(0.0, 1.0, exclude_max=True)),
    st.tuples(st.just("flip"), st.floats(0.0, 1.0, exclude_max=True), st.integers(0, 7)),
    st.tuples(st.just("more"), st.binary(min_size=1, max_size=9)),
)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(DAMAGE)
def test_a_damaged_file_is_refused_and_nothing_of_it_is_loaded(tmp_path: Path, damage: tuple[Any, ...]) -> None:
    path = tmp_path / "suffix.bin"
    if not path.exists():
        filled().save(tmp_path / "whole.bin")
        path.touch()
    data = bytearray((tmp_path / "whole.bin").read_bytes())
    if damage[0] == "cut":
        data = data[: int(damage[1] * len(data))]
    elif damage[0] == "flip":
        data[int(damage[1] * len(data))] ^= 1 << damage[2]
    else:
        data += damage[1]
    path.write_bytes(data)
    drafter = filled(seed=1)
    before = contents(drafter)
    with pytest.raises(RunError, match=r"suffix\.bin"):
        drafter.load(path)
    assert contents(drafter) == before


def test_a_newer_version_and_a_missing_file_are_named(tmp_path: Path) -> None:
    drafter = filled()
    path = tmp_path / "suffix.bin"
    with pytest.raises(RunError, match="cannot read"):
        drafter.load(path)
    drafter.save(path)
    data = path.read_bytes()
    path.write_bytes(data[:7] + b"9" + data[8:])
    with pytest.raises(RunError, match=r"version b'9'.*allowed: b'2'"):
        drafter.load(path)


def test_nothing_is_loaded_while_requests_decode(tmp_path: Path) -> None:
    drafter = filled()
    drafter.save(tmp_path / "suffix.bin")
    drafter.start("a", "p", [1])
    with pytest.raises(ValueError, match="1 requests decode"):
        drafter.load(tmp_path / "suffix.bin")

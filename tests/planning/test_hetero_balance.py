"""Shares and stages against every other way to divide."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_tlt.planning.hetero.balance import Curve, apportion, even_split, split_layers

rates = st.floats(0.01, 100.0)
curves = st.builds(Curve, st.floats(0, 50), rates, st.floats(0, 50), st.one_of(st.just(0.0), rates))


@settings(max_examples=80)
@given(st.lists(curves, min_size=1, max_size=4), st.integers(0, 9))
def test_shares_add_up_and_no_others_end_sooner(workers: list[Curve], total: int) -> None:
    shares, seconds = apportion(total, workers)
    assert sum(shares) == total and min(shares) >= 0
    assert seconds == max(curve(share) for curve, share in zip(workers, shares, strict=True))
    others = (split for split in product(range(total + 1), repeat=len(workers)) if sum(split) == total)
    best = min(max(curve(n) for curve, n in zip(workers, split, strict=True)) for split in others)
    assert seconds <= best * (1 + 1e-9)


@settings(max_examples=50)
@given(st.lists(curves, min_size=1, max_size=64), st.integers(0, 5000))
def test_large_batches_add_up(workers: list[Curve], total: int) -> None:
    shares, seconds = apportion(total, workers)
    assert sum(shares) == total
    # nobody could hand a unit to somebody who would end before the slowest does now
    slowest = max(range(len(workers)), key=lambda index: workers[index](shares[index]))
    rest = [curve(share + 1) for curve, share in zip(workers, shares, strict=True)]
    assert all(end >= seconds * (1 - 1e-9) for index, end in enumerate(rest) if index != slowest)


tables = st.integers(1, 4).flatmap(
    lambda stages: st.integers(1, 7).flatmap(
        lambda layers: st.lists(
            st.lists(st.one_of(st.floats(0, 10), st.just(np.inf)), min_size=layers + 1, max_size=layers + 1),
            min_size=stages,
            max_size=stages,
        )
    )
)


@settings(max_examples=100)
@given(tables)
def test_no_split_of_layers_has_a_faster_slowest_stage(rows: list[list[float]]) -> None:
    seconds = np.array(rows)
    stages, layers = seconds.shape[0], seconds.shape[1] - 1
    splits = [s for s in product(range(1, layers + 1), repeat=stages) if sum(s) == layers]
    best = min((max(seconds[i, n] for i, n in enumerate(split)) for split in splits), default=np.inf)
    found = split_layers(seconds)
    if found is None:
        assert best == np.inf
        return
    split, slowest = found
    assert sum(split) == layers and min(split) >= 1
    assert slowest == best == max(seconds[stage, own] for stage, own in enumerate(split))


def test_even_shares_differ_by_one_at_most() -> None:
    assert even_split(10, 4) == (3, 3, 2, 2) and even_split(2, 3) == (1, 1, 0)

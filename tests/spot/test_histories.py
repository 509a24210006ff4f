"""Random histories over faulty networks: the invariants hold in all of them, and every history settles."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_tlt.bench.coordinator_histories import FAULTS, Faults, run_history

SEEDS = 1700
"""Per kind of fault: more than 10,000 histories in all."""


@pytest.mark.parametrize("faults", FAULTS)
def test_invariants_hold_and_every_history_settles(faults: str) -> None:
    counts: Counter[str] = Counter()
    steps = 0
    for seed in range(SEEDS):
        history = run_history(seed, FAULTS[faults])
        assert not history.violations, history.violations
        counts += history.counts
        steps += history.steps
    # the invariants also hold if nothing happens, so check that something does
    assert counts["sessions"] > SEEDS / 2 and counts["further generations"] > SEEDS / 4 and steps > 3 * SEEDS
    for name in (
        "replicas lost",
        "replicas withdrawn",
        "sessions cut off",
        "ranks that came back",
        "replicas excluded",
    ):
        assert (counts[name] > SEEDS / 100) == (faults != "none"), name


shares = st.floats(0.0, 0.6)


@settings(max_examples=150)
@given(st.integers(0, 2**32), st.builds(Faults, shares, shares, shares, shares, shares))
def test_invariants_hold_at_any_share_of_faults(seed: int, faults: Faults) -> None:
    assert not run_history(seed, faults).violations


def test_a_history_is_a_function_of_its_seed() -> None:
    assert run_history(7, FAULTS["all"]) == run_history(7, FAULTS["all"]) != run_history(8, FAULTS["all"])

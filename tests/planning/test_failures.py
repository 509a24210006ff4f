"""ETTR with failures: the simulation agrees with the closed form, and faster recovery never hurts."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_tlt.planning.failures import (
    FailureModel,
    Recovery,
    closed_form,
    compare,
    draw_failures,
    simulate_ettr,
    simulate_run,
)

DAYS = 60.0
recoveries = st.builds(
    Recovery,
    name=st.just("one"),
    interval_s=st.floats(300, 20000),
    stall_s=st.floats(0, 60),
    restart_s=st.floats(0, 3000),
    shrinks=st.booleans(),
)
models = st.builds(
    FailureModel,
    devices=st.sampled_from([64, 1024, 9600]),
    mtbf_hours=st.floats(5e3, 1e5),
    node_lost=st.floats(0, 1),
    replacement_s=st.floats(0, 20000),
)
SPEEDS = (1.0, 0.8, 0.8, 0.5)


@pytest.mark.parametrize("devices", [256, 1024, 9600])
@pytest.mark.parametrize(
    "interval_s, restart_s, replacement_s", [(10000, 600, 3600), (1000, 300, 0), (1000, 60, 20000)]
)
def test_the_simulation_agrees_with_the_closed_form(
    devices: int, interval_s: float, restart_s: float, replacement_s: float
) -> None:
    recovery = Recovery("waits", interval_s, 10.0, restart_s)
    failures = FailureModel(devices, 50677, 0.78, replacement_s)
    traces = [draw_failures(failures.rate, 400.0, seed) for seed in range(40)]
    found = simulate_ettr(recovery, failures, traces, 400.0)
    # four standard errors, and the run's last, unfinished interval
    assert found.mean == pytest.approx(closed_form(recovery, failures), abs=4 * found.error + 1e-3)


@given(recoveries, models)
def test_without_failures_only_the_stalls_are_lost(recovery: Recovery, model: FailureModel) -> None:
    model = replace(model, mtbf_hours=inf)
    expected = recovery.interval_s / (recovery.interval_s + recovery.stall_s)
    assert draw_failures(model.rate, DAYS, 0) == []
    assert simulate_run(recovery, model, [], DAYS, SPEEDS) == pytest.approx(expected)
    if not recovery.shrinks:
        assert closed_form(recovery, model) == pytest.approx(expected)


@settings(max_examples=60, deadline=None)
@given(recoveries, models, st.floats(0, 1), st.integers(0, 1000))
def test_a_shorter_restart_never_lowers_it(recovery: Recovery, model: FailureModel, share: float, seed: int) -> None:
    trace = draw_failures(model.rate, DAYS, seed)
    slow = simulate_run(recovery, model, trace, DAYS, SPEEDS)
    fast = simulate_run(replace(recovery, restart_s=share * recovery.restart_s), model, trace, DAYS, SPEEDS)
    assert fast >= slow - 1e-12 and 0.0 <= slow <= 1.0
    if not recovery.shrinks:
        soon = replace(model, replacement_s=share * model.replacement_s)
        assert simulate_run(recovery, soon, trace, DAYS) >= simulate_run(recovery, model, trace, DAYS) - 1e-12


@settings(max_examples=60, deadline=None)
@given(recoveries, models, st.floats(0, 1), st.integers(0, 1000))
def test_more_failures_never_raise_it(recovery: Recovery, model: FailureModel, share: float, seed: int) -> None:
    trace = draw_failures(model.rate, DAYS, seed)
    fewer = [one for one in trace if one.mark < share]
    many, few = (simulate_run(recovery, model, chosen, DAYS, SPEEDS) for chosen in (trace, fewer))
    assert few >= many - 1e-12


@settings(max_examples=30, deadline=None)
@given(recoveries, models, st.integers(0, 1000))
def test_shrinking_to_full_speed_is_recovery_without_a_wait(recovery: Recovery, model: FailureModel, seed: int) -> None:
    trace = draw_failures(model.rate, DAYS, seed)
    # nodes that return after the run's end cause no further stall
    late = replace(model, replacement_s=2 * DAYS * 86400)
    shrinking = simulate_run(replace(recovery, shrinks=True), late, trace, DAYS, (1.0,) * (len(trace) + 1))
    without = simulate_run(replace(recovery, shrinks=False), replace(model, replacement_s=0.0), trace, DAYS)
    assert shrinking == pytest.approx(without)


def test_a_run_by_hand() -> None:
    # a day; durable points every 1,000 s and 10 s of stall; the only failure after 5,000 s takes a node along
    recovery, model = Recovery("waits", 990.0, 10.0, 600.0), FailureModel(8, 1000.0, 1.0, 3400.0)
    trace = [replace(draw_failures(1.0, 1.0, 0)[0], at=5500.0)]
    day = 86400.0
    waits = simulate_run(recovery, model, trace, 1.0)
    assert waits == pytest.approx((5000 + day - 5500 - 600 - 3400) * 0.99 / day)
    shrinks = simulate_run(replace(recovery, shrinks=True), model, trace, 1.0, (1.0, 0.5))
    # half as fast until the node returns after 3,400 s, then a stall as long as a restart
    assert shrinks == pytest.approx((5000 + 0.5 * (3400 - 600) + day - 5500 - 3400 - 600) * 0.99 / day)
    stands = simulate_run(replace(recovery, shrinks=True), model, trace, 1.0, (1.0,))
    assert stands == pytest.approx((5000 + day - 5500 - 3400 - 600) * 0.99 / day)
    with pytest.raises(ValueError, match="shrinks; allowed: mechanisms that wait"):
        closed_form(replace(recovery, shrinks=True), model)


def test_rows_compare_mechanisms_under_the_same_failures() -> None:
    failures = FailureModel(1024, 50677, 0.78, 3600.0)
    ways = [Recovery("disk", 10000.0, 10.0, 600.0), Recovery("disk, shrinks", 10000.0, 10.0, 600.0, True)]
    rows = compare(ways, failures, (1.0, 0.99, 0.98), 30.0, range(4))
    assert rows == compare(ways, failures, (1.0, 0.99, 0.98), 30.0, range(4))
    for row in rows:
        assert row.rate_half.mean >= row.now.mean >= row.rate_double.mean
    assert rows[0].recovery_half.mean >= rows[0].now.mean >= rows[0].recovery_double.mean
    assert rows[0].exact is not None and rows[1].exact is None
    assert rows[1].now.mean > rows[0].now.mean

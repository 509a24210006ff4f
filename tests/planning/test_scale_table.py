"""Sizes that a config can run on, and when a change between two of them pays."""

from __future__ import annotations

import random
from dataclasses import replace
from math import exp, inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_tlt.config.layouts import Layout
from megatron_tlt.errors import ConfigError
from megatron_tlt.planning.elastic import LayoutChooser
from megatron_tlt.planning.job import Job
from megatron_tlt.planning.machine import from_data_sheet
from megatron_tlt.planning.memory import MemoryPlan, plan_memory
from megatron_tlt.planning.scale_table import (
    PAYS,
    payback_probability,
    payback_seconds,
    scale_table,
    size_changes,
    summarize_scale,
)
from tests.planning.jobs import SEVEN, job

H100 = from_data_sheet("H100-80GB")


def _chooser(capacity: float) -> LayoutChooser:
    one = replace(job(SEVEN, Layout(16, tp=4, sp=True)), responses=128, prompts=64)

    def plan(choice: Job) -> MemoryPlan:
        return plan_memory(choice, capacity, None)

    return LayoutChooser(one, H100, plan, 4000.0)


def test_rows_begin_with_the_smallest_that_fits_and_never_get_slower() -> None:
    rows = scale_table(_chooser(43e9), [1, 2, 3, 4], 8, 2)
    assert rows[0].nodes > 1 and rows[-1].nodes == 4
    speeds = [row.throughput for row in rows]
    assert speeds == sorted(speeds)
    assert next(row.throughput for row in rows if row.nodes == 2) == 1.0
    figures = summarize_scale(rows, size_changes(rows, 2, 1000.0, {"disk": 600.0}))
    assert [size["used"] + size["idle"] for size in figures["sizes"]] == [8 * row.nodes for row in rows]
    assert all(change["after"] > 2 for change in figures["changes"])
    with pytest.raises(ConfigError, match="no layout with TP4"):
        scale_table(_chooser(10e9), [1, 2], 8, 2)


@given(st.floats(1, 1e4), st.floats(1.001, 8))
def test_a_change_has_paid_back_when_both_have_done_as_much(stall: float, speedup: float) -> None:
    at = payback_seconds(stall, speedup)
    assert speedup * (at - stall) == pytest.approx(at)


def test_the_probability_is_that_of_no_failure_until_then() -> None:
    chosen = random.Random(0)
    devices, mtbf_hours, stall, speedup = 1000, 500.0, 400.0, 1.5
    at = payback_seconds(stall, speedup)
    lasts = sum(chosen.expovariate(devices / (mtbf_hours * 3600)) > at for _ in range(20000)) / 20000
    probability = payback_probability(devices, mtbf_hours, stall, speedup)
    assert probability == pytest.approx(lasts, abs=0.015)
    assert probability == pytest.approx(exp(-1000 / (500 * 3600) * 400 * 1.5 / 0.5))
    assert payback_seconds(stall, 1.0) == inf and payback_probability(devices, mtbf_hours, stall, 1.0) == 0.0


@given(st.integers(1, 10000), st.floats(100, 1e5), st.floats(1, 1e4), st.floats(1.01, 4), st.floats(1, 3))
def test_it_pays_less_the_longer_the_stall(n: int, mtbf: float, stall: float, speedup: float, more: float) -> None:
    one = payback_probability(n, mtbf, stall, speedup)
    assert payback_probability(n, mtbf, stall * more, speedup) <= one
    assert payback_probability(n, mtbf, stall, speedup * more) >= one
    assert payback_probability(n, mtbf * more, stall, speedup) >= one


def test_changes_go_to_the_configs_size_and_beyond() -> None:
    rows = scale_table(_chooser(80e9), [1, 2, 4], 8, 2)
    changes = size_changes(rows, 2, 50677.0, {"disk": 600.0, "forks": 60.0})
    assert [(one.before, one.after, one.way) for one in changes] == [
        (a, b, way) for a, b in ((1, 2), (2, 4)) for way in ("disk", "forks")
    ]
    for one in changes:
        assert one.pays == (one.probability >= PAYS) and one.speedup >= 1.0
    # the same devices that fail every few minutes
    assert not any(one.pays for one in size_changes(rows, 2, 1.0, {"disk": 600.0}))

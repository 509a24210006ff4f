"""Whole steps: policies, drafter, tail batching, phases; the calibration; lengths."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_tlt.bench.calibration import (
    DERIVED,
    FITTED,
    LARGE,
    SMALL,
    Setup,
    derive,
    fit,
    published,
    speculation_speedup,
)
from megatron_tlt.config.spot import SpotConfig
from megatron_tlt.config.tail import TailConfig
from megatron_tlt.errors import ConfigError
from megatron_tlt.planning.simulation.constants import documented, shipped
from megatron_tlt.planning.simulation.lengths import LongTail, Recorded, draw, fit_long_tail, read_lengths
from megatron_tlt.planning.simulation.phases import bubble_steps, drafter_step_flops, training_seconds
from megatron_tlt.planning.simulation.policies import POLICIES, spread
from megatron_tlt.planning.simulation.scenario import Actor, Gate, Spot
from megatron_tlt.planning.simulation.steps import PHASES, simulate, speedup, summarize
from megatron_tlt.spot.coordinator import Coordinator
from megatron_tlt.spot.types import Report
from tests.planning.simulated import scenario


@settings(max_examples=12)
@given(
    seed=st.integers(0, 10**6),
    prompts=st.integers(4, 24),
    threshold=st.integers(1, 64),
    median=st.floats(50.0, 2000.0),
    sigma=st.floats(0.1, 1.5),
)
def test_training_the_drafter_never_lengthens_the_rollout(
    seed: int, prompts: int, threshold: int, median: float, sigma: float
) -> None:
    one = scenario(prompts=prompts, gate=Gate(threshold), lengths=LongTail(median, sigma))
    outcomes = simulate(one, ("off", "adaptive", "spot"), (seed,), 2)
    for plain, frozen, trained in zip(*(outcomes[name].steps[0] for name in ("off", "adaptive", "spot")), strict=True):
        assert plain.lengths_mean == frozen.lengths_mean == trained.lengths_mean
        assert trained.seconds["rollout"] <= frozen.seconds["rollout"] * (1 + 1e-9)
        # the drafter is trained in the bubble: no phase of a step is for it
        assert trained.seconds["drafter"] == 0.0
        assert {name: trained.seconds[name] for name in ("update", "log_probs", "reshard")} == {
            name: plain.seconds[name] for name in ("update", "log_probs", "reshard")
        }


def test_seeds_and_nothing_else_make_the_difference() -> None:
    first, again = (summarize(simulate(scenario(), POLICIES, (1, 2), 2)) for _ in range(2))
    assert first == again
    assert summarize(simulate(scenario(), POLICIES, (3, 4), 2)) != first


def test_the_order_of_policies_is_the_published_one() -> None:
    """Where the batch is small speculation pays, and a trained drafter on top of it."""
    rows = {row["policy"]: row for row in summarize(simulate(scenario(prompts=8), POLICIES, (0, 1, 2), 3))}
    assert rows["off"]["speedup"] == {"ratio": 1.0, "low": 1.0, "high": 1.0}
    assert 1.0 < rows["adaptive"]["speedup"]["ratio"] < rows["spot"]["speedup"]["ratio"]
    assert rows["spot"]["tokens_per_round"] > rows["adaptive"]["tokens_per_round"] > 1.0
    assert rows["spot"]["drafter_alignment"] > 0.3 > rows["adaptive"]["drafter_alignment"] == 0.0
    assert rows["off"]["speculating"] == 0.0 and rows["static"]["speculating"] == 1.0
    for row in rows.values():
        assert sum(row[f"{phase}_s"] for phase in PHASES) == pytest.approx(row["step_s"])


def test_a_least_number_of_drafter_steps_is_made_up_for_behind_the_update() -> None:
    one = scenario(spot=Spot(min_entries=4, min_steps=5000))
    step = simulate(one, ("spot",), (0,), 1)["spot"].steps[0][0]
    flops = drafter_step_flops(one, step.lengths_mean)
    rate = one.devices * one.device.flops * one.constants.training_efficiency
    assert step.seconds["drafter"] == pytest.approx((5000 - step.drafter_steps) * flops / rate)


@settings(max_examples=40)
@given(
    ends=st.lists(st.floats(0.1, 50.0), min_size=2, max_size=12),
    entries=st.integers(1, 9),
    min_replicas=st.integers(1, 6),
    min_entries=st.integers(1, 40),
)
def test_sessions_begin_when_the_products_coordinator_begins_them(
    ends: list[float], entries: int, min_replicas: int, min_entries: int
) -> None:
    count = len(ends)
    config = SpotConfig(min_replicas=min_replicas, min_entries=min_entries, lost_after_s=1e6)
    coordinator = Coordinator([[rank] for rank in range(count)], config, 0.0)
    for rank in range(count):
        coordinator.handle(Report(rank, 0, 0, False, True, 0, 0, None, -1), 0.0)
    began = None
    for rank in np.argsort(ends, kind="stable").tolist():
        coordinator.handle(Report(rank, 1, 0, True, True, entries, 0, None, -1), ends[rank])
        if began is None and coordinator.session is not None:
            began = ends[rank]
    assert coordinator.rollout_over and coordinator.session is None
    one = scenario(devices=count, engine_devices=1, spot=Spot(min_replicas=min_replicas, min_entries=min_entries))
    found = bubble_steps(one, np.array(ends), np.full(count, float(entries)), 100.0)
    rate = one.device.flops * one.constants.training_efficiency
    idle = found * drafter_step_flops(one, 100.0) / rate
    wanted = 0.0 if began is None else sum(max(ends) - max(end, began) for end in ends)
    assert idle == pytest.approx(wanted, abs=1e-6)


def test_tail_batching_selects_for_length_and_says_so() -> None:
    rows = {row["policy"]: row for row in summarize(simulate(scenario(), ("off", "tail"), (0, 1), 5))}
    assert rows["tail"]["kept_length_mean"] < rows["tail"]["full_length_mean"] == rows["off"]["kept_length_mean"]
    even = scenario(tail=TailConfig(eta_prompts=1.25))
    kept = summarize(simulate(even, ("off", "tail"), range(4), 10))[1]
    # without responses to spare, long prompts are late but not lost
    assert kept["kept_length_mean"] > rows["tail"]["kept_length_mean"]


def test_groups_stay_together_and_loads_are_even() -> None:
    lengths = np.arange(1.0, 41.0).reshape(10, 4)
    rows, place = spread(lengths, 4)
    assert (rows.ravel()[place] == lengths.ravel()).all()
    assert sorted((rows > 0).sum(axis=1).tolist()) == [8, 8, 12, 12]
    for group in lengths:
        assert len({int(np.flatnonzero((rows == value).any(axis=1))[0]) for value in group}) == 1
    few, place = spread(lengths[:2], 5)
    assert (few.ravel()[place] == lengths[:2].ravel()).all() and ((few > 0).sum(axis=1) > 0).all()


def test_training_time_follows_work_and_layout() -> None:
    lengths = np.full(64, 1000.0)
    one = scenario(actor=Actor(mini_batches=4, recompute=False))
    base = training_seconds(one, lengths)
    tokens, model = 64 * 1100.0, one.model
    flops = 2.0 * model.multiplied * tokens + 2.0 * model.layers * model.query * 64 * 1100.0**2
    rate = 16 * one.device.flops * one.constants.training_efficiency
    assert base["log_probs"] == pytest.approx(flops / rate) and base["update"] == pytest.approx(3 * flops / rate)
    again = training_seconds(replace(one, actor=Actor(mini_batches=4, recompute=True, log_prob_passes=2)), lengths)
    assert again["update"] == pytest.approx(4 / 3 * base["update"])
    assert again["log_probs"] == pytest.approx(2 * base["log_probs"])
    deep = replace(one, actor=Actor(pipeline=4, mini_batches=4, recompute=False))
    interleaved = replace(one, actor=Actor(pipeline=4, interleaved=2, mini_batches=4, recompute=False))
    assert base["update"] < training_seconds(interleaved, lengths)["update"] < training_seconds(deep, lengths)["update"]
    # a mini-batch's longest sequence is one rank's
    one_long = np.array([*np.full(63, 10.0), 4000.0])
    assert training_seconds(one, one_long)["log_probs"] * rate / 16 > 2.0 * model.multiplied * 4100


@pytest.mark.parametrize(("devices", "prompts"), [(1, 2), (100_000, 6_250)])
def test_from_one_device_to_a_hundred_thousand(devices: int, prompts: int) -> None:
    one = scenario(devices=devices, engine_devices=1 if devices == 1 else 2, prompts=prompts)
    rows = {row["policy"]: row for row in summarize(simulate(one, ("off", "spot", "tail"), (0,), 1))}
    # one engine has nobody to wait for, and no bubble to train in
    assert (rows["off"]["idle"] == 0.0) == (devices == 1) == (rows["spot"]["drafter_steps"] == 0.0)
    assert rows["spot"]["speedup"]["ratio"] > 1.0


def test_what_cannot_run_is_refused_in_one_go() -> None:
    wrong = scenario(devices=15, engine_devices=2, actor=Actor(tensor=4), max_response_tokens=10**7)
    with pytest.raises(ConfigError) as raised:
        simulate(wrong, ("off",), (0,), 1)
    found = str(raised.value).splitlines()
    assert [line.split(":")[0] for line in found] == [
        "rollout.tensor_parallel_size",
        "actor.megatron",
        "rollout.max_response_tokens",
    ]


# Lengths


@settings(max_examples=10)
@given(seed=st.integers(0, 10**6), median=st.floats(500.0, 3000.0), sigma=st.floats(0.4, 1.3))
def test_the_fit_finds_the_law_behind_what_was_cut_off(seed: int, median: float, sigma: float) -> None:
    law, normal = LongTail(median, sigma), np.random.default_rng(seed).standard_normal(4000)
    longest = 1.5 * median
    tokens = law.at(normal, longest)
    assert tokens.max() == longest or tokens.max() == np.ceil(longest)
    found = fit_long_tail(tokens.tolist(), longest)
    assert found.median == pytest.approx(median, rel=0.1) and found.sigma == pytest.approx(sigma, rel=0.12)


def test_a_trace_is_drawn_from_as_it_is(tmp_path: Path) -> None:
    trace = Recorded((3.0, 5.0, 8.0, 13.0))
    drawn = trace.at(draw(np.random.default_rng(0), 500, 8, 0.5), 10.0)
    assert set(np.unique(drawn)) == {3.0, 5.0, 8.0, 10.0}
    assert np.isclose((drawn == 3.0).mean(), 0.25, atol=0.04)
    together = draw(np.random.default_rng(1), 4000, 2, 0.5)
    assert np.corrcoef(together.T)[0, 1] == pytest.approx(0.5, abs=0.05)
    forms = {
        "a.json": "[4, 2, 9]",
        "b.jsonl": "4\n2\n9\n",
        "c.jsonl": '{"step": 1, "lengths": [4, 2]}\n{"step": 2, "lengths": [9]}\n',
        "d.jsonl": '{"length": 4}\n{"length": 2}\n{"token_ids": [1, 2, 3, 4, 5, 6, 7, 8, 9]}\n',
        "e.json": '{"source": "recorded", "environment": {}, "rollouts": [[[4, 2], [9]]]}',
        "run/lengths.jsonl": '{"step": 1, "lengths": [4, 2, 9], "finish_reasons": {"stop": 3}}\n',
    }
    for name, text in forms.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        assert read_lengths(file if file.parent == tmp_path else file.parent).tokens == (2.0, 4.0, 9.0), name
    for text in ("no", "[]", "[0, 3]", json.dumps({"other": 1})):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ConfigError, match="--lengths"):
            read_lengths(tmp_path / "bad.json")
    with pytest.raises(ConfigError, match="--lengths: cannot read"):
        read_lengths(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="2 and more"):
        fit_long_tail([7.0, 7.0], 100.0)


# Calibration


def test_every_constant_says_where_it_comes_from() -> None:
    kinds = {name: entry["kind"] for name, entry in documented().items()}
    assert set(kinds.values()) == {"assumed", "published", "measured", "derived", "fitted"}
    assert {name for name, kind in kinds.items() if kind == "fitted"} == set(FITTED)
    assert {name for name, kind in kinds.items() if kind == "derived"} == set(DERIVED)
    assert all(entry["source"] for entry in documented().values())


def test_derived_constants_are_what_the_published_figures_give() -> None:
    again = derive(replace(shipped(), **dict.fromkeys(DERIVED, 0.5)))
    for name in DERIVED:
        assert getattr(shipped(), name) == pytest.approx(getattr(again, name), rel=2e-3), name


def test_single_steps_follow_the_published_table() -> None:
    for verify, row in published()["speculation_32b"].items():
        errors = {batch: speculation_speedup(verify, batch, shipped()) / known - 1 for batch, known in row.items()}
        assert all(abs(error) < 0.13 for error in errors.values()), errors


@pytest.mark.parametrize("model", [SMALL, LARGE])
def test_published_speedups_come_out_of_the_shipped_constants(model: str) -> None:
    """The 7B row was fitted to; the 32B row was not."""
    for nodes, known in published()["speedups"][model].items():
        found = Setup().speedup(model, nodes, shipped(), range(2))["ratio"]
        assert found == pytest.approx(known, rel=0.15), nodes


def test_the_fit_reproduces_a_row_that_the_simulation_made() -> None:
    """From figures of other constants than it starts from."""
    setup, seeds = Setup(prompts=16), (0,)
    truth = replace(shipped(), length_median=1500.0, length_sigma=1.0, training_efficiency=0.1)
    row = {nodes: setup.speedup(SMALL, nodes, truth, seeds)["ratio"] for nodes in (1, 2, 4)}
    found = fit(shipped(), setup, seeds, row)
    for nodes, known in row.items():
        assert setup.speedup(SMALL, nodes, found, seeds)["ratio"] == pytest.approx(known, rel=0.02)
    untouched = {name for name in documented() if name not in FITTED}
    assert all(getattr(found, name) == getattr(shipped(), name) for name in untouched)


def test_a_speedup_has_the_seeds_spread() -> None:
    found = speedup(simulate(scenario(), ("off", "spot"), range(4), 1), "spot")
    assert 1.0 < found["low"] < found["ratio"] < found["high"]

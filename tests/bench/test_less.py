"""Mixtures of few problems: what the runs get, and how they are judged."""

from __future__ import annotations

import argparse
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from megatron_tlt.bench import less
from megatron_tlt.config.loader import load_config
from megatron_tlt.errors import ConfigError
from megatron_tlt.observe.report_data import RunData
from megatron_tlt.tasks.pool import TIERS
from tests.bench.test_learning import run_of
from tests.helpers.launch import REPOSITORY

CONFIG = REPOSITORY / "launch" / "less-cpu.yaml"
SEEDS = (1, 2)


def run_with(rates: dict[int, float], norm: float = 1.0) -> RunData:
    """Pass rates by step, alike in all tiers; gradients of norm 1, and one of ``norm``."""
    data = run_of(1, 0.5)
    data.metrics = [
        {"step": step, **{f"eval/{tier}/pass_at_1": rate for tier in TIERS}} for step, rate in rates.items()
    ] + [{"step": step, "actor/grad_norm": norm if step == 7 else 1.0} for step in range(1, 20)]
    return data


def test_each_arm_is_a_pool_of_its_size_and_tiers(tmp_path: Path) -> None:
    config = load_config(CONFIG)
    arms = less._arms(config, tmp_path / "train.json")
    assert len(arms) == 6
    common = less._common(config, tmp_path / "held.json")
    for arm, overrides in arms.items():
        one = load_config(CONFIG, [*common, *overrides])
        (task,) = one.tasks
        assert task.budget == int(arm.partition("-")[2]) and task.params == config.tasks[0].params
        assert task.tier_mix is not None and (task.tier_mix.hard > 0) == arm.startswith("mixed")
        assert [each.name for each in one.evaluation.sets] == list(TIERS)
        assert one.trainer.steps % one.evaluation.every == 0
    less._check_ends(config.trainer.prompts_per_step)


@pytest.mark.parametrize(
    ("prompts", "size", "end"), [(4, 500, 150), (16, 100, 8), (1000, 100, 0)], ids=["after", "between", "before"]
)
def test_epochs_that_do_not_end_at_an_evaluation_are_refused(prompts: int, size: int, end: int, tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    less.add_arguments(parser)
    given = ["--config", str(CONFIG), "--folder", str(tmp_path), "--set", f"trainer.prompts_per_step={prompts}"]
    said = rf"found {prompts}; 1\.2 epochs of {size} problems end at step {end}, .* at 15, 30, 45, 60, 75; allowed: 8"
    with pytest.raises(ConfigError, match=said):
        less.run(parser.parse_args([*given, "--minutes", "0"]))


def test_what_a_mixture_is_worth_in_easy_problems() -> None:
    easy = (0.2, 0.4, 0.5)
    assert [less.worth_in_easy(easy, mixed) for mixed in (0.2, 0.3, 0.45, 0.6)] == [100, 150, 350, float("inf")]
    assert less.worth_in_easy(easy, 0.19) == float("-inf"), "fewer easy problems may be as good"
    assert less.worth_in_easy((0.4, 0.2, 0.6), 0.4) == 100, "more problems that do worse are not worth more"


def test_a_run_that_falls_has_collapsed() -> None:
    fell = less.collapses(run_with({0: 0.2, 25: 0.9, 125: 0.5}, norm=850.0))
    assert fell == {"collapsed": 1.0, "steep gradients": 1.0, "steps without gradient": 0.0}
    assert less.collapses(run_with({0: 0.2, 25: 0.9, 125: 0.8}, norm=0.0))["collapsed"] == 0.0


def test_intervals_are_those_of_problems_and_seeds() -> None:
    drawn, rates = less.bootstrap([[0.5, 0.5, 0.5]] * 3, np.random.default_rng(0))
    assert rates.tolist() == [0.5] * 3
    # three runs of 200 problems: 0.5 / sqrt(600)
    assert np.std(drawn[:, 0]) == pytest.approx(0.0204, rel=0.1)
    spread, _ = less.bootstrap([[0.2] * 3, [0.8] * 3], np.random.default_rng(0))
    assert np.std(spread[:, 0]) > 0.2, "seeds that differ widen it"


def test_both_tables_are_judged_and_drawn(tmp_path: Path) -> None:
    curve = {0: 0.2, 15: 0.3, 30: 0.4, 45: 0.4, 60: 0.4, 75: 0.5}
    found = {(arm, seed): run_with(curve) for arm in less._names() for seed in SEEDS}
    found |= {("mixed-100", seed): run_with(curve | {75: 0.9}) for seed in SEEDS}
    result = less.judge(found, SEEDS, prompts_per_step=8)
    assert len(result.rows) == 14
    rows = {(row["table"], row["problems"]): row for row in result.rows}
    worth = rows["fixed epochs", "easy ones that mixed-100 is worth"]
    assert worth["low"] == float("-inf") and 100 <= worth["high"] < 200, "it is worth 100 at fixed epochs, give or take"
    assert worth["worth"].startswith("100 (below 100 to 1")
    above = rows["fixed steps", "easy ones that mixed-100 is worth"]["worth"]
    assert above == "above 500 (above 500 to above 500)"
    found |= {("mixed-100", seed): run_with(dict.fromkeys(curve, 0.1)) for seed in SEEDS}
    worse = less.judge(found, SEEDS, prompts_per_step=8)
    below = [row["worth"] for row in worse.rows if "worth" in row]
    assert below == ["below 100 (below 100 to below 100)"] * 2
    worse.write(tmp_path / "less.json")
    written = json.loads((tmp_path / "less.json").read_text())
    name = "easy problems that mixed-100 is worth, over 100, fixed steps"
    assert written["targets"][name]["value"] is None and not written["targets"][name]["met"]
    found |= {("mixed-100", seed): run_with(curve | {75: 0.9}) for seed in SEEDS}
    assert rows["fixed epochs", "easy-100"]["pass rate"] == pytest.approx(0.3)
    assert rows["fixed epochs", "easy-500"]["pass rate"] == rows["fixed steps", "easy-100"]["pass rate"] == 0.5
    met = {name: entry["met"] for name, entry in result.targets.items()}
    assert met.pop("runs that collapsed")
    assert all(met[name] == name.endswith("steps") for name in met), met
    fell = less.judge(found | {("easy-200", 2): run_with(curve | {75: 0.2})}, SEEDS, prompts_per_step=8)
    assert fell.targets["runs that collapsed"] == {"value": 1.0, "target": 0, "op": "==", "met": False}
    assert {entry["op"] for entry in less.judge({}, SEEDS, 8).targets.values()} == {"incomplete"}
    ElementTree.fromstring(less.plot(found))

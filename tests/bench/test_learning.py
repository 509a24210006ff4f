"""The comparison of reward curves: which means differ, what is missing, what is drawn."""

from __future__ import annotations

import argparse
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from megatron_tlt.bench import learning
from megatron_tlt.config.loader import dump_resolved, load_config
from megatron_tlt.errors import ConfigError
from megatron_tlt.observe.report_data import CONFIG_FILE, RunData
from tests.helpers.launch import REPOSITORY

SEEDS = [1, 2, 3]


def run_of(seed: int, last: float) -> RunData:
    """Reward rises to ``last`` with noise of 0.02 a step; so does what is held out."""
    draw = np.random.default_rng(seed)
    rewards = np.linspace(0.3, last, 30) + draw.normal(0, 0.02, 30)
    metrics = [{"step": step + 1, "reward/mean": float(reward)} for step, reward in enumerate(rewards)]
    passed = [{"step": step, "eval/pass_at_1": float(rewards[max(0, step - 1)])} for step in (0, 10, 20, 30)]
    return RunData(f"run-{seed}", metrics=[*passed, *metrics])


def runs(with_last: float) -> dict[tuple[str, int], RunData]:
    found = {("without", seed): run_of(seed, 0.5) for seed in SEEDS}
    return found | {("with", seed): run_of(10 + seed, with_last) for seed in SEEDS}


def test_means_that_differ_are_told_apart_and_others_not() -> None:
    same = learning.judge(runs(0.5), SEEDS)
    assert len(same.targets) == 2 and same.all_met
    other = learning.judge(runs(0.3), SEEDS)
    assert not any(target["met"] for target in other.targets.values())
    difference = next(row for row in other.rows if row["seed"] == "training reward")
    # of two lines that rise by 0.2 and not at all, over the last third of the steps
    assert difference["difference"] == pytest.approx(-0.2 * (20 + 29) / 2 / 29, abs=0.02)
    assert difference["half_interval"] > 0


def test_equal_values_without_variance_do_not_differ() -> None:
    assert learning.compare([0.0, 0.0, 0.0], [0.0, 0.0, 0.0]) == {"p": 1.0, "difference": 0.0, "half_interval": 0.0}


def test_a_run_that_is_missing_leaves_the_targets_incomplete() -> None:
    found = runs(0.5)
    del found["with", 3]
    result = learning.judge(found, SEEDS)
    assert {target["op"] for target in result.targets.values()} == {"incomplete"}
    assert len(result.rows) == 5


def test_only_a_whole_run_is_not_run_again(tmp_path: Path) -> None:
    assert not learning._is_done(tmp_path, 30)
    (tmp_path / "summary.json").write_text(json.dumps({"steps": 12}))
    assert not learning._is_done(tmp_path, 30)
    (tmp_path / "summary.json").write_text(json.dumps({"steps": 30}))
    assert learning._is_done(tmp_path, 30)


def test_a_run_under_other_settings_is_refused(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    learning.add_arguments(parser)
    config = str(REPOSITORY / "launch" / "quickstart-cpu.yaml")
    given = ["--config", config, "--folder", str(tmp_path), "--seeds", "1", "--minutes", "-1"]
    folder = tmp_path / "with-1"
    overrides = ["run.name=with-1", f"run.dir={folder}", "run.seed=1"]
    folder.mkdir()
    (folder / CONFIG_FILE).write_text(dump_resolved(load_config(config, overrides)))
    (folder / "summary.json").write_text(json.dumps({"steps": 30}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in run_of(1, 0.5).metrics))
    result = learning.run(parser.parse_args(given, argparse.Namespace(json=None)))
    assert [row["seed"] for row in result.rows] == [1]
    other = parser.parse_args([*given, "--set", "algorithm.group_size=4"], argparse.Namespace(json=None))
    with pytest.raises(ConfigError, match=r"with-1: a run with other settings: algorithm.group_size: 8 -> 4"):
        learning.run(other)


def test_the_plot_has_both_arms() -> None:
    drawn = learning.plot(runs(0.5))
    ElementTree.fromstring(drawn)
    assert drawn.count(b"with speculation") and drawn.count(b"without speculation")

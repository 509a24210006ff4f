"""Runs of a benchmark: which are finished, which are refused, what is drawn."""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_tlt.bench import algorithms, less, schedules, training_runs
from megatron_tlt.config.loader import dump_resolved, load_config
from megatron_tlt.errors import ConfigError
from megatron_tlt.observe.report_data import CONFIG_FILE
from tests.bench.test_learning import SEEDS, run_of
from tests.helpers.launch import REPOSITORY


def test_only_a_whole_run_is_not_run_again(tmp_path: Path) -> None:
    assert not training_runs.is_finished(tmp_path, 30)
    (tmp_path / "summary.json").write_text(json.dumps({"steps": 12}))
    assert not training_runs.is_finished(tmp_path, 30)
    (tmp_path / "summary.json").write_text(json.dumps({"steps": 30}))
    assert training_runs.is_finished(tmp_path, 30)


def test_a_run_under_other_settings_is_refused(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    training_runs.add_run_arguments(parser, "runs/of-a-benchmark")
    config = str(REPOSITORY / "launch" / "quickstart-cpu.yaml")
    given = ["--config", config, "--folder", str(tmp_path), "--seeds", "1", "--minutes", "-1"]
    folder = tmp_path / "with-1"
    overrides = ["run.name=with-1", f"run.dir={folder}", "run.seed=1"]
    folder.mkdir()
    (folder / CONFIG_FILE).write_text(dump_resolved(load_config(config, overrides)))
    (folder / "summary.json").write_text(json.dumps({"steps": 30}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in run_of(1, 0.5).metrics))
    arms = {"with": [], "without": ["speculation.enabled=false"]}
    assert list(training_runs.finished_runs(parser.parse_args(given), arms)) == [("with", 1)]
    other = parser.parse_args([*given, "--set", "algorithm.group_size=4"])
    with pytest.raises(ConfigError, match=r"with-1: a run with other settings: algorithm.group_size: 8 -> 4"):
        training_runs.finished_runs(other, arms)


def test_a_kept_result_is_of_the_values_of_its_config(tmp_path: Path) -> None:
    config = REPOSITORY / "launch" / "quickstart-cpu.yaml"
    out, inputs = tmp_path / "kept" / "one.json", [str(config)]
    one, moved = load_config(config), load_config(config, ["run.dir=elsewhere"])
    changed = load_config(config, ["actor.optimizer.lr=0.5"])  # as if the file had been edited
    assert not training_runs.kept_result(out, inputs, changed)
    assert not training_runs.kept_result(out, inputs, one), "nothing was made from the other one"
    out.write_text("{}")
    assert training_runs.kept_result(out, inputs, one) and training_runs.kept_result(out, inputs, moved)
    with pytest.raises(
        ConfigError, match=r"one\.json: made with other settings: actor\.optimizer\.lr: .* -> 0\.5; allowed"
    ):
        training_runs.kept_result(out, inputs, changed)
    out.with_suffix(".config.yaml").unlink()  # an earlier release kept the inputs alone
    assert training_runs.kept_result(out, inputs, changed)


@pytest.mark.parametrize("benchmark", ["less", "elastic", "optimizers"])
def test_benchmarks_do_not_reuse_results_of_a_config_that_was_edited(benchmark: str, tmp_path: Path) -> None:
    module = importlib.import_module(f"megatron_tlt.bench.{benchmark}")
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    parser.add_argument("--json", type=Path)
    shipped = "less-cpu" if benchmark == "less" else "quickstart-cpu"
    config, folder = tmp_path / "mine.yaml", tmp_path / "runs"
    config.write_text(f"defaults: [{REPOSITORY / 'launch' / shipped}.yaml]\n")
    arguments = parser.parse_args(["--config", str(config), "--folder", str(folder), "--minutes", "-1"])
    made = []

    def keep(out: Path, *inputs: Any) -> bool:
        made.append(out)
        return training_runs.kept_result(out, *inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "kept_result", keep)
        patch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=0))
        if benchmark == "less":
            less._calibrate(arguments, folder / "tiers.json", "train", 1, 10)
        else:
            module.run(arguments)
        made[0].write_text("{}")
        config.write_text(config.read_text() + "algorithm: {group_size: 4}\n")
        with pytest.raises(ConfigError, match=r"made with other settings: algorithm\.group_size: 8 -> 4"):
            if benchmark == "less":
                less._calibrate(arguments, folder / "tiers.json", "train", 1, 10)
            else:
                module.run(arguments)


@pytest.mark.parametrize("count", [2, 9])
def test_every_arm_is_drawn_with_its_label(count: int) -> None:
    labels = {f"arm{index}": f"label {index}" for index in range(count)}
    drawn = training_runs.plot_curves({(arm, seed): run_of(seed, 0.5) for arm in labels for seed in SEEDS}, labels)
    ElementTree.fromstring(drawn)
    assert all(drawn.count(label.encode()) for label in labels.values())


def test_gains_are_judged_by_mean_and_interval() -> None:
    lasts = {"grpo": (0.5, 0.5, 0.5), "rloo": (0.3, 0.3, 0.3), "reinforce": (0.9, 0.3, 0.3)}
    found = {(arm, seed): run_of(seed, last) for arm, of in lasts.items() for seed, last in zip(SEEDS, of, strict=True)}
    for data in found.values():
        data.metrics = [row | {"time/total": 2.0} if "reward/mean" in row else row for row in data.metrics]
    result = algorithms.judge(found, SEEDS)
    met = {name: entry["met"] for name, entry in result.targets.items() if entry["op"] != "incomplete"}
    assert met == {
        "gain of grpo": True,
        "lower end of the gain of grpo": True,
        "gain of rloo": False,
        "lower end of the gain of rloo": False,
        "gain of reinforce": True,
        "lower end of the gain of reinforce": False,  # one seed of three
    }
    assert result.targets["gain of dapo"]["op"] == "incomplete"
    assert {row["recipe"]: row["median step (s)"] for row in result.rows} == dict.fromkeys(lasts, 2.0)


def test_every_recipe_that_learns_from_rewards_is_an_arm() -> None:
    config = REPOSITORY / "launch" / "quickstart-cpu.yaml"
    chosen = [load_config(config, overrides).algorithm.name for overrides in algorithms.ARMS.values()]
    assert chosen[:2] == ["grpo", "grpo"] and len(set(chosen)) == 9


def test_schedules_are_judged_and_drawn_over_time() -> None:
    config = REPOSITORY / "launch" / "quickstart-cpu.yaml"
    loaded = {arm: load_config(config, overrides) for arm, overrides in schedules.ARMS.items()}
    assert [one.schedule.kind for one in loaded.values() if one.schedule] == ["partial", "one_step_off"]
    assert [one.tail.deferred for one in loaded.values() if one.tail] == ["resample", "continue"]
    lasts = {"sync": 0.5, "partial": 0.5}
    found = {(arm, seed): run_of(seed, last) for arm, last in lasts.items() for seed in SEEDS}
    for data in found.values():
        extra = {"time/total": 2.0, "tail/staleness": 1.0}
        data.metrics = [row | extra if "reward/mean" in row else row for row in data.metrics]
    result = schedules.judge(found, SEEDS)
    assert result.targets["gain of sync"]["met"] and result.targets["gain of tail"]["op"] == "incomplete"
    steps = len(found["sync", 1].series("reward/mean")[0])
    assert [(row["seconds"], row["staleness"]) for row in result.rows] == [(2.0 * steps, 1.0)] * 2
    assert [(row["wasted"], row["kept_over_all"]) for row in result.rows] == [(0.0, 1.0)] * 2
    drawn = schedules.plot_over_time(found)
    ElementTree.fromstring(drawn)
    assert b"partial" in drawn and b"seconds of training" in drawn
    for data in found.values():  # fewer steps than a mean is over
        data.metrics = [row for row in data.metrics if "reward/mean" in row][:3]
    ElementTree.fromstring(schedules.plot_over_time(found))


def test_a_running_mean_of_few_values_is_that_of_all() -> None:
    assert training_runs.running_mean([1.0, 2.0, 3.0, 6.0], 2).tolist() == [1.5, 2.5, 4.5]
    assert training_runs.running_mean([1.0, 3.0], 4).tolist() == [2.0]

"""The comparison of optimizers: its trials, and how they are judged."""

from __future__ import annotations

import argparse
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from megatron_tlt.bench import optimizers
from megatron_tlt.bench.training_runs import kept_result
from megatron_tlt.config.loader import load_config
from megatron_tlt.errors import ConfigError
from tests.bench.test_learning import run_of
from tests.helpers.launch import REPOSITORY

CONFIG = REPOSITORY / "launch" / "quickstart-deterministic.yaml"
SEEDS = (1, 2, 3)


def trial(last: float, steps: int = 100) -> dict[str, Any]:
    losses = [2.0 - (2.0 - last) * step / (steps - 1) for step in range(steps)]
    return {"losses": losses, "seconds": list(range(1, steps + 1)), "state_bytes": 80, "weights": 10}


TRIALS = {
    (name, factor): trial((1.0 if name == "muon" else 1.5) + abs(factor - 0.5))
    for name in optimizers.CANDIDATES
    for factor in optimizers.FACTORS
}


def test_every_candidate_is_a_valid_config_with_its_own_rate() -> None:
    for candidate in optimizers.CANDIDATES.values():
        config = load_config(CONFIG, candidate.overrides(0.5, 0.25, 0.02))
        assert (config.actor.optimizer["lr"], config.actor.optimizer["weight_decay"]) == (0.5, 0.02)
        split = config.actor.optimizer_split
        assert (split is None) != candidate.splits and (split is None or split.lr == 0.25)


def test_every_adamw_of_the_warm_ups_has_the_same_betas() -> None:
    arguments = argparse.Namespace(set=[], steps=3)
    found = {}
    for name in ("adamw", "muon"):
        candidate = optimizers.CANDIDATES[name]
        found[name] = load_config(CONFIG, optimizers._warm_up_overrides(arguments, candidate, 0.02, 2e-3)).actor
    split = found["muon"].optimizer_split
    assert split is not None and split.optimizer == "torch.optim.AdamW"
    alone = found["adamw"].optimizer
    assert split.optimizer_arguments["betas"] == [alone.get("adam_beta1", 0.9), alone["adam_beta2"]] == [0.9, 0.98]


def test_a_result_of_other_settings_is_not_taken(tmp_path: Path) -> None:
    out = tmp_path / "of" / "trial.json"
    assert not kept_result(out, ["lr=1"])
    out.write_text("{}")
    assert kept_result(out, ["lr=1"])
    with pytest.raises(ConfigError, match="made with other settings"):
        kept_result(out, ["lr=2"])
    out.with_suffix(".inputs.json").unlink()
    with pytest.raises(ConfigError, match="made with other settings"):
        kept_result(out, ["lr=1"])


def test_the_best_rate_is_the_one_with_the_least_loss() -> None:
    best = optimizers.best_factors(TRIALS, optimizers.CANDIDATES)
    assert best == dict.fromkeys(optimizers.CANDIDATES, 0.5)
    some = {key: value for key, value in TRIALS.items() if key != ("sgd", 2.0)}
    assert "sgd" not in optimizers.best_factors(some, optimizers.CANDIDATES)
    assert optimizers.last_loss({"losses": [1.0, float("nan")]}) == float("inf")


def test_steps_to_a_level_count_whole_windows() -> None:
    losses = [3.0] * 30 + [1.0] * 30
    assert optimizers.steps_to(losses, 1.0) == 50
    assert optimizers.steps_to(losses, 3.0) == optimizers.WINDOW
    assert optimizers.steps_to(losses, 0.5) == float("inf")


def test_rows_and_targets() -> None:
    found = {}
    for name in optimizers.CANDIDATES:
        for seed in SEEDS:
            data = run_of(seed, 0.6 if name == "adamw" else 0.2)
            extra = {"time/total": 2.0, "time/update": 0.5}
            data.metrics = [row | extra if "reward/mean" in row else row for row in data.metrics]
            found[name.replace(", ", "-"), seed] = data
    best = optimizers.best_factors(TRIALS, optimizers.CANDIDATES)
    result = optimizers.judge(TRIALS, best, found, optimizers.CANDIDATES, SEEDS)
    assert len(result.rows) == 20 + 4
    met = {name: entry["met"] for name, entry in result.targets.items()}
    assert met["gain of adamw"] and not met["gain of sgd"] and "gain of learned, random" not in met
    assert met["Muon's steps to AdamW's last loss, over AdamW's"]
    (row,) = (row for row in result.rows if row["part"] == "warm-up" and row["optimizer"] == "sgd" and row["best"])
    assert row["rate"] == 0.1 and row["state (bytes per weight)"] == 8 and not row["best at the grid's edge"]
    edge = {**best, "sgd": optimizers.FACTORS[0]}
    rows = optimizers.judge(TRIALS, edge, found, optimizers.CANDIDATES, SEEDS).rows
    assert [row["optimizer"] for row in rows if row.get("best at the grid's edge")] == ["sgd"]
    ElementTree.fromstring(optimizers.plot(TRIALS, best, found))
    one = {key: data for key, data in found.items() if key[1] == SEEDS[0]}
    partly = optimizers.judge(TRIALS, best, one, optimizers.CANDIDATES, SEEDS)
    assert [row["gain, half interval"] for row in partly.rows if row["part"] == "RL"] == [None] * 4
    assert partly.targets["gain of adamw"]["op"] == "incomplete" and "gain of learned, random" not in partly.targets
    nothing = optimizers.judge({}, {}, {}, optimizers.CANDIDATES, SEEDS)
    assert {entry["op"] for entry in nothing.targets.values()} == {"incomplete"}


@pytest.mark.distributed
def test_a_warm_up_writes_its_curve(tmp_path: Path) -> None:
    given = ["model.recipe.tokenizer.num_problems=200", "model.recipe.supervised.problems_per_step=4"]
    arguments = argparse.Namespace(config=CONFIG, set=given, steps=3, folder=tmp_path)
    out = tmp_path / "muon.json"
    overrides = optimizers._warm_up_overrides(arguments, optimizers.CANDIDATES["muon"], 0.02, 2e-3)
    optimizers._warm_up(arguments, "muon", overrides, out)
    found = json.loads(out.read_text())
    assert len(found["losses"]) == len(found["seconds"]) == 3
    assert found["seconds"] == sorted(found["seconds"])
    assert 4.0 < found["state_bytes"] / found["weights"] < 4.3, "one momentum, and two moments of the embedding"

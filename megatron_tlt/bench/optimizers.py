"""Which optimizer for reinforcement learning: each tuned alike in the supervised warm-up, then in RL; resumable.

Every optimizer has the same number of learning rates to try. RL starts from the model that the launch config's recipe
builds, with each optimizer's best rate of the warm-up times the config's own ratio of both rates.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from megatron_tlt.bench.algorithms import interval
from megatron_tlt.bench.learning import late_reward
from megatron_tlt.bench.result import BenchmarkResult
from megatron_tlt.bench.training_runs import Runs, add_run_arguments, finished_runs, kept_result, running_mean
from megatron_tlt.bench.workers import run_worker
from megatron_tlt.config.loader import load_config
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.errors import ConfigError, RunError
from megatron_tlt.models.recipe import RECIPE_FILE, recipe_folder
from megatron_tlt.observe.environment import describe_environment
from megatron_tlt.platform.files import atomic_write_bytes

LEARNED = "megatron_tlt.bench.learned_optimizer.FactoredMlp"
WINDOW = 20
"""Steps at the end of a warm-up whose mean loss is compared."""
_BETA2 = 0.98
"""Of every AdamW in the warm-ups: the quickstart's own."""
_DECAY = 0.01
"""Weight decay of every warm-up."""
_TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Candidate:
    """An optimizer: its class, the middle of the rates to try, and its arguments."""

    path: str
    middle: float
    arguments: dict[str, Any] = field(default_factory=dict)
    splits: bool = False

    def overrides(self, lr: float, others: float, decay: float, beta2: float | None = None) -> list[str]:
        """Of the actor's section.

        Args:
            lr: the rate.
            others: the rate of what a split leaves to AdamW.
            decay: of all matrices.
            beta2: of every AdamW, alone or beside another optimizer; None: 0.999, the default of both classes.
        """
        found = [
            f"actor.optimizer.optimizer={self.path}",
            f"actor.optimizer.lr={lr!r}",
            f"actor.optimizer.weight_decay={decay!r}",
        ]
        if self.arguments:
            found.append(f"actor.optimizer_arguments={json.dumps(self.arguments)}")
        betas = {} if beta2 is None else {"optimizer_arguments": {"betas": [0.9, beta2]}}
        if self.splits:
            found.append(f"actor.optimizer_split={json.dumps({'lr': others, 'weight_decay': decay, **betas})}")
        if self.path == "adam" and beta2 is not None:
            found.append(f"actor.optimizer.adam_beta2={beta2!r}")
        return found


CANDIDATES = {
    "adamw": Candidate("adam", 2e-3),
    "muon": Candidate("torch.optim.Muon", 2e-2, {"momentum": 0.95}, splits=True),
    "sgd": Candidate("torch.optim.SGD", 0.2, {"momentum": 0.9}),
    "learned, random": Candidate(LEARNED, 1e-5),
}
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""The rates to try, times each candidate's middle."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser, "runs/optimizers")
    parser.set_defaults(config=Path("launch/quickstart-deterministic.yaml"))
    parser.add_argument("--steps", type=int, default=200, help="steps of each warm-up (%(default)s)")
    parser.add_argument(
        "--adafaclo", type=Path, metavar="FOLDER", help="weights of PyLO's AdafacLO, which is then a candidate too"
    )


def run(arguments: argparse.Namespace) -> BenchmarkResult:
    """A row per trial, and one per optimizer; targets: all learn, and Muon needs fewer steps than AdamW.

    Raises:
        ConfigError: the config has no recipe, or an existing run has other settings.
        RunError: a run failed.
    """
    began = time.monotonic()
    config = load_config(arguments.config, arguments.set)
    if config.model.recipe is None:
        raise ConfigError(f"{arguments.config}: found no model.recipe; allowed: a config whose model is warmed up")
    candidates = dict(CANDIDATES)
    if arguments.adafaclo is not None:
        given = {"hf_key": str(arguments.adafaclo.resolve())}
        candidates["learned, AdafacLO"] = Candidate("pylo.optim.AdafacLO_naive", 1.0, given)
    own = float({**config.actor.optimizer, **config.model.recipe.supervised.optimizer}["lr"])
    trials: dict[tuple[str, float], dict[str, Any]] = {}
    for name, candidate in candidates.items():
        for factor in FACTORS:
            out = arguments.folder / "warm-up" / f"{name.replace(', ', '-')}-{factor:g}.json"
            overrides = _warm_up_overrides(arguments, candidate, candidate.middle * factor, own)
            if not kept_result(out, [str(arguments.config), *overrides], load_config(arguments.config, overrides)):
                if time.monotonic() - began > 60 * arguments.minutes:
                    continue
                _warm_up(arguments, f"{candidate.path}, factor {factor:g}", overrides, out)
            trials[name, factor] = json.loads(out.read_text(encoding="utf-8"))
    found: Runs = {}
    best = best_factors(trials, candidates)
    if best.keys() == candidates.keys():
        found = _reinforcement(arguments, config, candidates, best, own, began)
    if arguments.json is not None and trials:
        atomic_write_bytes(arguments.json.with_suffix(".svg"), plot(trials, best, found))
    return judge(trials, best, found, candidates, arguments.seeds)


def _warm_up_overrides(arguments: argparse.Namespace, candidate: Candidate, lr: float, others: float) -> list[str]:
    return [
        *arguments.set,
        *candidate.overrides(lr, others, _DECAY, _BETA2),
        f"model.recipe.supervised.num_steps={arguments.steps}",
        f"model.recipe.supervised.optimizer={json.dumps({'lr': lr, 'weight_decay': _DECAY})}",
        "observe.progress=false",
    ]


def _warm_up(arguments: argparse.Namespace, what: str, overrides: Sequence[str], out: Path) -> None:
    given = [str(arguments.config), json.dumps(list(overrides)), str(arguments.folder / "start"), str(out)]
    processes = load_config(arguments.config, arguments.set).launcher.world_size
    run_worker(f"warm-up by {what}", "warm_up", given, processes, _TIMEOUT_S)


def last_loss(trial: Mapping[str, Any]) -> float:
    """The mean loss of the last steps; infinite if it is not a number."""
    found = float(np.mean(trial["losses"][-WINDOW:]))
    return found if np.isfinite(found) else float("inf")


def best_factors(
    trials: Mapping[tuple[str, float], Mapping[str, Any]], candidates: Mapping[str, Candidate]
) -> dict[str, float]:
    """The best factor of each candidate whose trials are complete."""
    return {
        name: min(FACTORS, key=lambda factor: last_loss(trials[name, factor]))
        for name in candidates
        if all((name, factor) in trials for factor in FACTORS)
    }


def _reinforcement(
    arguments: argparse.Namespace,
    config: TltConfig,
    candidates: Mapping[str, Candidate],
    best: Mapping[str, float],
    own: float,
    began: float,
) -> Runs:
    model = recipe_folder(config)
    if not (model / RECIPE_FILE).is_file():
        _build(arguments)
    ratio, decay = float(config.actor.optimizer["lr"]) / own, float(config.actor.optimizer.get("weight_decay", 0.0))
    arms = {}
    for name, candidate in candidates.items():
        rate = candidate.middle * best[name] * ratio
        common = ["model.recipe=null", f"model.path={model}"]
        arms[name.replace(", ", "-")] = [*common, *candidate.overrides(rate, own * ratio, decay)]
    left = arguments.minutes - (time.monotonic() - began) / 60
    return finished_runs(argparse.Namespace(**{**vars(arguments), "minutes": left}), arms)


def _build(arguments: argparse.Namespace) -> None:
    """Builds the recipe's model, by a run of one step."""
    given = [*arguments.set, f"run.dir={arguments.folder / 'model'}", "trainer.steps=1", "evaluation.every=0"]
    command = [sys.executable, "-m", "megatron_tlt", "train", str(arguments.config), *given]
    if subprocess.run(command, check=False).returncode:
        raise RunError(f"the model could not be built; to see why, run: {' '.join(command[1:])}")


def steps_to(losses: Sequence[float], level: float) -> float:
    """The first step from which the mean loss over the window is at most ``level``; infinite if it never is."""
    smooth = running_mean(losses, WINDOW)
    below = np.flatnonzero(smooth <= level * (1.0 + 1e-9))
    return float(below[0] + 1 + len(losses) - len(smooth)) if len(below) else float("inf")


def judge(
    trials: Mapping[tuple[str, float], Mapping[str, Any]],
    best: Mapping[str, float],
    found: Runs,
    candidates: Mapping[str, Candidate],
    seeds: Sequence[int],
) -> BenchmarkResult:
    """Rows of what has run, and targets of what is complete."""
    result = BenchmarkResult(environment=describe_environment(), name="optimizers")
    for (name, factor), trial in trials.items():
        result.rows.append(
            {
                "part": "warm-up",
                "optimizer": name,
                "rate": candidates[name].middle * factor,
                "best": best.get(name) == factor,
                "best at the grid's edge": best.get(name) == factor and factor in (FACTORS[0], FACTORS[-1]),
                "loss": last_loss(trial),
                "seconds": trial["seconds"][-1],
                "state (bytes per weight)": trial["state_bytes"] / trial["weights"],
            }
        )
    for name in candidates:
        arm = name.replace(", ", "-")
        runs = [found[arm, seed] for seed in seeds if (arm, seed) in found]
        complete = len(runs) == len(seeds) > 1
        if not complete and "random" not in name:
            result.incomplete(f"gain of {name}")
        if not runs:
            continue
        passed = [data.series("eval/pass_at_1")[1] for data in runs]
        gains = [values[-1] - values[0] for values in passed]
        result.rows.append(
            {
                "part": "RL",
                "optimizer": name,
                "runs": len(runs),
                "gain": float(np.mean(gains)),
                "gain, half interval": interval(gains) if len(gains) > 1 else None,
                "reward, last steps": float(np.mean([late_reward(data) for data in runs])),
                "seconds": float(np.mean([sum(data.series("time/total")[1]) for data in runs])),
                "seconds of updates": float(np.mean([sum(data.series("time/update")[1]) for data in runs])),
                "gains by seed": gains,
            }
        )
        if complete and "random" not in name:
            result.target(f"gain of {name}", float(np.mean(gains)), ">=", 0.05)
    if best.keys() >= {"adamw", "muon"}:
        adamw, muon = (trials[name, best[name]] for name in ("adamw", "muon"))
        level = last_loss(adamw)
        share = steps_to(muon["losses"], level) / steps_to(adamw["losses"], level)
        result.target("Muon's steps to AdamW's last loss, over AdamW's", share, "<=", 0.75)
    else:
        result.incomplete("Muon's steps to AdamW's last loss, over AdamW's")
    return result


def plot(trials: Mapping[tuple[str, float], Mapping[str, Any]], best: Mapping[str, float], found: Runs) -> bytes:
    """The SVG of loss (warm-up) and reward (RL), each against steps and against seconds."""
    import matplotlib

    from megatron_tlt.observe.report_style import CURVE_COLORS, STANDALONE, new_figure

    buffer = io.BytesIO()
    with matplotlib.rc_context({**STANDALONE, "svg.hashsalt": "optimizers"}):
        figure = new_figure(height=5.6, width=9.0)
        (loss_steps, loss_seconds), (pass_steps, pass_seconds) = figure.subplots(2, 2)
        for (name, factor), color in zip(best.items(), CURVE_COLORS, strict=False):
            trial = trials[name, factor]
            smooth = running_mean(trial["losses"], WINDOW)
            warmed = range(1, 1 + len(trial["losses"]))
            loss_steps.plot(warmed[-len(smooth) :], smooth, color=color, lw=1.6, label=name)
            loss_seconds.plot(trial["seconds"][-len(smooth) :], smooth, color=color, lw=1.6)
            runs = [data for (arm, _), data in sorted(found.items()) if arm == name.replace(", ", "-")]
            if not runs:
                continue
            steps = runs[0].series("eval/pass_at_1")[0]
            passed = np.array([data.series("eval/pass_at_1")[1] for data in runs])
            ends = [[0.0, *accumulate(data.series("time/total")[1])] for data in runs]
            seconds = np.array([[of_run[int(step)] for step in steps] for of_run in ends])
            for axes, at in ((pass_steps, np.array(steps)), (pass_seconds, seconds.mean(0))):
                axes.plot(at, passed.mean(0), color=color, lw=1.6)
                axes.fill_between(at, passed.min(0), passed.max(0), color=color, alpha=0.12, lw=0)
        for axes, label in ((loss_steps, "steps"), (loss_seconds, "seconds")):
            axes.set_xlabel(f"{label} of the warm-up")
            axes.set_ylabel("loss")
            axes.set_yscale("log")
        for axes, label in ((pass_steps, "RL steps"), (pass_seconds, "seconds of RL")):
            axes.set_xlabel(label)
            axes.set_ylabel("held-out pass@1")
        figure.legend(*loss_steps.get_legend_handles_labels(), loc="outside upper left", ncols=len(best) or 1)
        figure.savefig(buffer, format="svg", facecolor="white", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()

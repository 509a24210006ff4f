"""Acceptance in the real engine while the policy changes: n-grams, a frozen drafter, adapted drafters."""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from megatron_tlt.bench.result import BenchmarkResult
from megatron_tlt.bench.workers import measure_in_worker
from megatron_tlt.config.drafter_kinds import KINDS
from megatron_tlt.config.loader import load_config
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.recipe import model_folder
from megatron_tlt.observe.environment import describe_environment

LOSSES = ("eagle", "kl", "tv")
MORE = "more"
"""The arm with as many further steps and new responses as the adapted ones, all from the first policy."""
ADAPTED = 1.2
"""Target ratio of an adapted drafter's acceptance length to the frozen one's at the end."""
WEIGHTED = ", reward-weighted"
_GIVEN = (
    *("steps", "session_steps", "warm_steps", "warm_problems", "drafts", "lr", "entries", "unroll", "problems"),
    *("set", "losses", "weighted", "more"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", type=Path, default=Path("launch/quickstart-deterministic.yaml"), help="launch config"
    )
    parser.add_argument("--model", type=Path, help="model folder (default: the config's)")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="of the config")
    parser.add_argument("--kinds", nargs="+", choices=tuple(KINDS), default=tuple(KINDS), help="of drafters")
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=LOSSES, help="an adapted drafter for each")
    parser.add_argument("--weighted", action="store_true", help="and for each with responses weighted by reward")
    parser.add_argument(
        "--more",
        action="store_true",
        help="a drafter with as many steps on new responses of the first policy",
    )
    parser.add_argument(
        "--head", type=Path, help="folder of a trained drafter from which all start (default: a warm-up)"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="seeds, one run each")
    parser.add_argument("--steps", type=int, default=10, help="number of RL steps")
    parser.add_argument("--session-steps", type=int, default=60, help="drafter steps per RL step")
    parser.add_argument("--warm-steps", type=int, default=400, help="drafter steps before the first RL step")
    parser.add_argument("--warm-problems", type=int, default=384, help="number of responses for the warm-up")
    parser.add_argument("--drafts", type=int, default=3, help="draft tokens per step (K)")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of the drafters")
    parser.add_argument("--entries", type=int, default=16, help="responses per drafter step")
    parser.add_argument("--unroll", type=int, help="successive drafts that are trained (default: the drafter's)")
    parser.add_argument("--problems", type=int, default=64, help="held-out problems, one sampled response each")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for one run")


def _run(arguments: argparse.Namespace, folder: Path, kind: str, seed: int) -> list[dict[str, float]]:
    given: dict[str, Any] = {
        "config": str(arguments.config),
        "model": str(folder),
        "head": None if arguments.head is None else str(arguments.head.resolve()),
        "kind": kind,
        "seed": seed,
        **{key: getattr(arguments, key) for key in _GIVEN},
    }
    rows: list[dict[str, float]] = measure_in_worker(f"{kind}, seed {seed}", "drafter", given, arguments.timeout)
    return rows


def run(arguments: argparse.Namespace) -> BenchmarkResult:
    """A row per drafter, seed and RL step; targets by drafter and loss, over the seeds.

    Raises:
        ConfigError: the model does not exist yet, or a head is given for drafters of several kinds.
    """
    if arguments.head is not None and len(arguments.kinds) > 1:
        raise ConfigError(
            f"--head {arguments.head}: found --kinds {' '.join(arguments.kinds)}; allowed: the head's own"
        )
    result = BenchmarkResult(environment=describe_environment(), name="drafter")
    folder = arguments.model or model_folder(load_config(arguments.config, arguments.set))
    arms = [loss + weighting for weighting in ("", WEIGHTED)[: 1 + arguments.weighted] for loss in arguments.losses]
    for kind in arguments.kinds:
        runs = [_run(arguments, folder, kind, seed) for seed in arguments.seeds]
        for seed, rows in zip(arguments.seeds, runs, strict=True):
            result.rows += [{"kind": kind, "seed": seed, **row} for row in rows]
        for arm in arms:
            ends = [rows[-1][arm] / rows[-1]["frozen"] for rows in runs]
            lowest = min(row[arm] / row["frozen"] for rows in runs for row in rows)
            result.target(f"{kind}, {arm}: adapted over frozen at the end", statistics.median(ends), ">=", ADAPTED)
            result.target(f"{kind}, {arm}: adapted over frozen, lowest on the way", lowest, ">=", 0.97)
            if arguments.more:
                ends = [rows[-1][arm] / rows[-1][MORE] for rows in runs]
                result.target(f"{kind}, {arm}: adapted over {MORE} at the end", statistics.median(ends), ">=", 1.05)
    return result

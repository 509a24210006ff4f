"""Whole RL steps with one of two ranks at half speed: even shares against shares by speed, interleaved."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_tlt.bench.result import BenchmarkResult, ratio_of_medians
from megatron_tlt.bench.workers import measure_in_worker
from megatron_tlt.errors import ConfigError
from megatron_tlt.observe.environment import describe_environment

ARMS = ("even", "by speed")
PHASES = ("rollout", "log_probs", "update")
"""Phases whose work is divided by speed."""
_GIVEN = ("rounds", "prompts", "group", "longest", "competitors", "seed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, default=Path("launch/quickstart-deterministic.yaml"), help="its recipe")
    parser.add_argument("--model", type=Path, help="model folder (default: the recipe's architecture, not trained)")
    parser.add_argument("--rounds", type=int, default=10, help="interleaved steps of each arm")
    parser.add_argument("--settle", type=int, default=2, help="number of the first of these that do not count")
    parser.add_argument("--prompts", type=int, default=48, help="problems per step")
    parser.add_argument("--group", type=int, default=8, help="responses per problem")
    parser.add_argument("--longest", type=int, default=0, help="tokens of the longest response; 0: as recorded")
    parser.add_argument("--competitors", type=int, default=1, help="busy processes on the slow rank's core")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for all steps")


def summarize(found: Mapping[str, Any], settle: int) -> list[dict[str, Any]]:
    """A row per arm: medians over the counted steps, the slowest rank's.

    ``wait_s`` is the mean over ranks of the time that they wait for the other's engine. ``slow over fast`` is the time
    of the slow rank over the fast one's, for the same work before each round.
    """
    seconds = {arm: _of(found["steps"], arm, "time/total", settle) for arm in ARMS}
    divided = {arm: [sum(parts) for parts in zip(*_phases(found["steps"], arm, settle), strict=True)] for arm in ARMS}
    work = found["work"][settle:]
    rows = []
    for arm in ARMS:
        phases = zip(PHASES, _phases(found["steps"], arm, settle), strict=True)
        rows.append(
            {
                "arm": arm,
                "speeds": found["speeds"][arm],
                "step_s": statistics.median(seconds[arm]),
                **{f"{name}_s": statistics.median(values) for name, values in phases},
                "wait_s": statistics.median(_of(found["steps"], arm, "time/idle", settle)),
                "step, even over it": ratio_of_medians(seconds["even"], seconds[arm]),
                "divided phases, even over it": ratio_of_medians(divided["even"], divided[arm]),
                "slow over fast": ratio_of_medians([slow for _, slow in work], [fast for fast, _ in work]),
                "seconds": seconds[arm],
            }
        )
    return rows


def _of(steps: Sequence[Mapping[str, Any]], arm: str, name: str, settle: int) -> list[float]:
    rows = sorted((row for row in steps if row["arm"] == arm), key=lambda row: int(row["round"]))
    return [float(row[name]) for row in rows[settle:]]


def _phases(steps: Sequence[Mapping[str, Any]], arm: str, settle: int) -> list[list[float]]:
    return [_of(steps, arm, f"time/{phase}", settle) for phase in PHASES]


def judge(result: BenchmarkResult, competitors: int) -> None:
    """The gain of a whole step, and whether the slow rank was as slow as meant: within a tenth."""
    row = result.rows[-1]
    result.target("whole step, even shares over shares by speed", row["step, even over it"]["ratio"], ">=", 1.25)
    off = abs(row["slow over fast"]["ratio"] / (1 + competitors) - 1)
    result.target("slow rank's slowness off what was meant, share", off, "<=", 0.1)


def run(arguments: argparse.Namespace) -> BenchmarkResult:
    """A row per arm; targets where each rank had a core of its own.

    Raises:
        ConfigError: no round would count.
        RunError: the processes failed.
    """
    if arguments.rounds <= arguments.settle:
        raise ConfigError(f"--rounds: found {arguments.rounds}; allowed: more than --settle, {arguments.settle}")
    result = BenchmarkResult(environment=describe_environment(), name="shares")
    given = {name: getattr(arguments, name) for name in _GIVEN} | {"config": str(arguments.config)}
    given["model"] = None if arguments.model is None else str(arguments.model)
    found = measure_in_worker("shares", "shares", given, arguments.timeout, 2)
    result.rows = summarize(found, arguments.settle)
    if found["pinned"]:
        judge(result, arguments.competitors)
    return result

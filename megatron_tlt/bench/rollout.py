"""Whole long-tailed rollouts with every method of speculation: off, each strategy alone, vLLM's, and the tuners."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_tlt.bench.result import BenchmarkResult, ratio_of_medians
from megatron_tlt.bench.workers import measure_in_worker
from megatron_tlt.config.loader import load_config
from megatron_tlt.models.recipe import model_folder
from megatron_tlt.observe.environment import describe_environment

TUNERS = ("beg_mab", "solver", "oracle")
# Defaults by target. A step of the quickstart's model ends before budgets would be computed. Its rollouts are short and
# vary most; the large one's take ten times as long.
DEFAULTS: dict[str, dict[str, Any]] = {
    "quickstart": {"lengths": "none", "rollouts": 4, "repeats": 5},
    "large": {"lengths": "optimal", "rollouts": 1, "repeats": 3},
}
OVERHEAD = 1.015
"""Step time of an engine that could draft over that of one that cannot."""
WHOLE = "whole rollout"
ABLE = "off, able to draft"
"""The arm of an engine that could draft but does not; "off" is one built without speculation."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--targets", nargs="+", choices=("quickstart", "large"), default=["quickstart", "large"])
    parser.add_argument(
        "--config", type=Path, default=Path("launch/quickstart-deterministic.yaml"), help="launch config"
    )
    parser.add_argument("--model", type=Path, help="model folder (default: the config's)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], help="initial batch sizes")
    parser.add_argument("--rollouts", type=int, help="rollouts per initial batch and measurement (default: by target)")
    parser.add_argument(
        "--repeats", type=int, help="interleaved repeats, after one in which tuners have no data (default: by target)"
    )
    parser.add_argument("--requests", type=int, default=96, help="requests in quickstart's whole rollout")
    parser.add_argument("--drafts", type=int, default=7, help="maximum number of draft tokens")
    parser.add_argument("--threshold", type=int, default=64, help="running batch up to which tuners may speculate")
    parser.add_argument(
        "--lengths", choices=("none", "classes", "optimal"), help="the tuners' budgets by length (default: by target)"
    )
    parser.add_argument(
        "--length-spread", type=float, default=0.25, help="standard deviation of a length's logarithm over repeats"
    )
    parser.add_argument(
        "--warm-problems", type=int, default=384, help="responses for the training of quickstart's head"
    )
    parser.add_argument("--warm-steps", type=int, default=600, help="training steps of that head")
    parser.add_argument("--large-requests", type=int, default=64, help="requests in the large target's whole rollout")
    parser.add_argument(
        "--large-layers", type=int, default=12, help="layers of the large target; 12 have 105 million weights"
    )
    parser.add_argument("--large-shortest", type=int, default=16, help="tokens of its shortest response")
    parser.add_argument("--large-longest", type=int, default=512, help="tokens of its longest")
    parser.add_argument("--acceptance", type=float, default=0.8, help="share of correct replayed draft tokens")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--record", type=Path, help="append each measurement to this file, one per line")
    parser.add_argument("--timeout", type=float, default=7200.0, help="seconds for one target")


def _measured(arguments: argparse.Namespace, target: str) -> dict[str, Any]:
    own = set(vars(arguments)) - {"targets", "config", "model", "timeout", "json", "record"}
    given = {key: getattr(arguments, key) for key in own} | {"target": target, "config": str(arguments.config)}
    given |= {name: value for name, value in DEFAULTS[target].items() if given[name] is None}
    if given["lengths"] == "none":
        given["lengths"] = None
    given["record"] = str(arguments.record.resolve()) if arguments.record else None
    if target == "quickstart":
        given["model"] = str(arguments.model or model_folder(load_config(arguments.config, [])))
    found: dict[str, Any] = measure_in_worker(f"rollout, {target}", "rollout", given, arguments.timeout)
    return found


def summarize(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """By case and arm: seconds of the repeats in order, those of the first round, and the acceptance length."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        arm = found.setdefault(row["case"], {}).setdefault(row["arm"], {"seconds": [], "cold": None})
        if row["repeat"]:
            arm["seconds"].append(row["seconds"])
        else:
            arm["cold"] = row["seconds"]
        arm["acceptance_length"], arm["tokens"] = row["acceptance_length"], row["tokens"]
    return found


def _median(arm: Mapping[str, Any]) -> float:
    return statistics.median(arm["seconds"])


def judge(result: BenchmarkResult, target: str, cases: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
    """Targets of one target model, for each tuner except the oracle."""
    whole = cases[WHOLE]
    overheads = [_median(arms[ABLE]) / _median(arms["off"]) for arms in cases.values()]
    result.target(
        f"{target}: time able to draft over unable, median of all cases", statistics.median(overheads), "<=", OVERHEAD
    )
    own = [arm for arm in whole if arm not in (*TUNERS, "off", ABLE) and not arm.startswith("vLLM's")]
    single = min(_median(whole[arm]) for arm in [*own, "off"])
    for tuner in ("beg_mab", "solver"):
        at_batches = [
            min(_median(arms[arm]) for arm in [*own, "off"]) / _median(arms[tuner])
            for name, arms in cases.items()
            if name != WHOLE
        ]
        against_off = [_median(arms["off"]) / _median(arms[tuner]) for arms in cases.values()]
        name = f"{target}, {tuner}"
        result.target(f"{name}: speed over the best strategy at each batch, lowest", min(at_batches), ">=", 0.97)
        result.target(
            f"{name}: speed over the best single strategy, whole rollout", single / _median(whole[tuner]), ">=", 1.10
        )
        result.target(f"{name}: speed over off, whole rollout", against_off[list(cases).index(WHOLE)], ">=", 2.0)
        result.target(f"{name}: speed over off, lowest anywhere", min(against_off), ">=", 0.98)


def run(arguments: argparse.Namespace) -> BenchmarkResult:
    """A row per target, case and arm; ratios are of medians of interleaved repeats, with the spread of pairs.

    Raises:
        ConfigError: the model does not exist yet.
        RunError: a target's process failed.
    """
    result = BenchmarkResult(environment=describe_environment(), name="rollout")
    for target in arguments.targets:
        found = _measured(arguments, target)
        cases = summarize(found["rows"])
        for case, arms in cases.items():
            for arm, measured in arms.items():
                result.rows.append(
                    {
                        "target": target,
                        "weights": found["weights"],
                        "longest_over_median": found["lengths"]["max_over_median"],
                        "drafts": "replayed" if target == "large" else "real",
                        "case": case,
                        "arm": arm,
                        "seconds": _median(measured),
                        "speed_over_off": ratio_of_medians(arms["off"]["seconds"], measured["seconds"]),
                        "first_round_s": measured["cold"],
                        "acceptance_length": measured["acceptance_length"],
                        "tokens": measured["tokens"],
                    }
                )
        judge(result, target, cases)
    return result

"""Acceptance of a head's drafts after engine steps without the head."""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from megatron_tlt.bench.result import BenchmarkResult, ratio_of_medians
from megatron_tlt.bench.workers import measure_in_worker
from megatron_tlt.config.drafter_kinds import KINDS
from megatron_tlt.config.loader import load_config
from megatron_tlt.models.recipe import model_folder
from megatron_tlt.observe.environment import describe_environment


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", type=Path, default=Path("launch/quickstart-deterministic.yaml"), help="launch config"
    )
    parser.add_argument("--model", type=Path, help="model folder (default: the config's)")
    parser.add_argument("--kinds", nargs="+", choices=tuple(KINDS), default=list(KINDS))
    parser.add_argument("--gaps", type=int, nargs="+", default=[4, 16, 64], help="engine steps without the head")
    parser.add_argument("--drafting", type=int, default=4, help="engine steps with it, after each gap")
    parser.add_argument("--requests", type=int, default=64, help="requests per rollout")
    parser.add_argument("--repeats", type=int, default=3, help="repeats, each with its own seed")
    parser.add_argument("--drafts", type=int, default=3, help="draft tokens per step (K)")
    parser.add_argument("--warm-problems", type=int, default=384, help="responses that heads learn from")
    parser.add_argument("--warm-steps", type=int, default=600, help="training steps of the heads")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for the whole benchmark")


def run(arguments: argparse.Namespace) -> BenchmarkResult:
    """A row per kind, gap and arm: acceptance lengths of the repeats, and their ratio to those without a gap.

    Raises:
        ConfigError: the model does not exist yet.
        RunError: the measuring process failed.
    """
    result = BenchmarkResult(environment=describe_environment(), name="gap")
    own = set(vars(arguments)) - {"config", "model", "timeout", "json"}
    given: dict[str, Any] = {key: getattr(arguments, key) for key in own} | {"config": str(arguments.config)}
    given["model"] = str(arguments.model or model_folder(load_config(arguments.config, [])))
    rows: list[dict[str, Any]] = measure_in_worker("gap", "gap", given, arguments.timeout)
    found: dict[tuple[str, int, str], list[float]] = {}
    for row in rows:
        found.setdefault((row["kind"], row["gap"], row["arm"]), []).append(row["acceptance_length"])
    for (kind, gap, arm), lengths in found.items():
        whole = found[kind, 0, "filled"]
        result.rows.append(
            {
                "kind": kind,
                "gap": gap,
                "arm": arm if gap else "no gap",
                "acceptance_length": statistics.median(lengths),
                "over_no_gap": ratio_of_medians(lengths, whole),
                "repeats": lengths,
            }
        )
    for kind in arguments.kinds:
        ratios = [row["over_no_gap"]["ratio"] for row in result.rows if (row["kind"], row["arm"]) == (kind, "filled")]
        result.target(f"{kind}: acceptance length after a filled gap over none, lowest", min(ratios), ">=", 0.97)
    return result

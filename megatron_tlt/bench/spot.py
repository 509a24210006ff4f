"""Whole RL steps at recorded lengths: no speculation, a drafter trained in the step, one trained in its bubbles."""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_tlt.bench.result import BenchmarkResult, ratio_of_medians
from megatron_tlt.bench.workers import measure_in_worker
from megatron_tlt.config.loader import load_config
from megatron_tlt.models.recipe import model_folder
from megatron_tlt.observe.environment import describe_environment

ARMS = ("off", "SD", "SD + spot")
PHASES = ("rollout", "reward", "log_probs", "update", "drafter", "reshard")
# A step of the quickstart as configured, and one of few responses, which is mostly rollout, as in practice.
DEFAULTS: dict[str, dict[str, Any]] = {
    "quickstart": {
        "prompts": 48,
        "group": 8,
        "longest": 0,
        "drafts": 3,
        "tuner": "beg_mab",
        "entries": 16,
        "unroll": 3,
        "micro_batch": 512,
        "lr": 1e-3,
        "warm_problems": 384,
        "warm_steps": 200,
    },
    "large": {
        "prompts": 4,
        "group": 2,
        "longest": 512,
        "drafts": 7,
        "tuner": "none",
        "entries": 4,
        "unroll": 1,
        "micro_batch": 560,
        "lr": 3e-3,
        "warm_problems": 64,
        "warm_steps": 100,
    },
}
_GIVEN = (
    *("arms", "rounds", "pairs", "session_steps", "warm_entries"),
    *("layers", "hidden", "vocab", "certainty", "seed"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--targets", nargs="+", choices=sorted(DEFAULTS), default=["quickstart", "large"])
    parser.add_argument(
        "--config", type=Path, default=Path("launch/quickstart-deterministic.yaml"), help="launch config"
    )
    parser.add_argument("--model", type=Path, help="model folder (default: the config's)")
    parser.add_argument("--ranks", type=int, help="ranks of the timed rows (default: one per core)")
    parser.add_argument("--more-ranks", type=int, nargs="*", default=[4, 8], help="ranks of quickstart's untimed rows")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="arms of the timed rows")
    parser.add_argument("--rounds", type=int, default=12, help="interleaved RL steps of each arm")
    parser.add_argument("--settle", type=int, default=2, help="number of the first of these that do not count")
    parser.add_argument(
        "--pairs",
        type=int,
        default=10,
        help="rollouts with training in the bubble, without, and with independent training",
    )
    parser.add_argument("--more-rounds", type=int, default=6, help="RL steps of each untimed row")
    for name, text in (
        ("prompts", "problems per step"),
        ("group", "responses per problem"),
        ("longest", "tokens of the longest response; 0: as recorded"),
        ("drafts", "maximum draft tokens per step (K)"),
        ("entries", "responses per rank and drafter step"),
        ("unroll", "successive drafts that are trained"),
        ("micro-batch", "tokens of a drafter's micro-batch; at least the longest response"),
        ("warm-problems", "responses for the head's warm-up"),
        ("warm-steps", "steps of the head before the first rollout"),
    ):
        parser.add_argument(f"--{name}", type=int, help=f"{text} (default: by target)")
    parser.add_argument(
        "--tuner", choices=("none", "beg_mab", "solver"), help="tuner of the strategy (default: by target)"
    )
    parser.add_argument("--lr", type=float, help="learning rate of the drafters (default: by target)")
    parser.add_argument("--session-steps", type=int, default=5, help="drafter steps after an update, without spot")
    parser.add_argument("--warm-entries", type=int, default=8, help="responses per step of the head's warm-up")
    parser.add_argument("--layers", type=int, default=26, help="layers of the large target; 26 have 99 million weights")
    parser.add_argument("--hidden", type=int, default=512, help="hidden size of the large target, a multiple of 64")
    parser.add_argument("--vocab", type=int, default=512, help="vocabulary of the large target")
    parser.add_argument(
        "--certainty", type=float, default=0.9, help="probability of the large target's likeliest token"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for one target at one number of ranks")


def _measured(arguments: argparse.Namespace, target: str, ranks: int, **changed: Any) -> dict[str, Any]:
    asked = vars(arguments)
    given = {name: asked[name] for name in _GIVEN} | {"target": target, "config": str(arguments.config)}
    given |= {name: value if asked[name] is None else asked[name] for name, value in DEFAULTS[target].items()}
    if target == "quickstart":
        given["model"] = str(arguments.model or model_folder(load_config(arguments.config, [])))
    given |= changed
    given["prompts"] = max(given["prompts"], ranks)
    what = f"spot, {target}, {ranks} ranks"
    found: dict[str, Any] = measure_in_worker(what, "spot", given, arguments.timeout, ranks)
    return found


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest-rank percentile, which is a measured value.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("no values for a percentile")
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def summarize(found: Mapping[str, Any], settle: int) -> dict[str, dict[str, Any]]:
    """A row per arm: medians over the counted rounds; idle shares and latencies over all rounds with a session.

    ``found["pairs"]`` are further bubbles of the arm that trains in them. ``seconds`` are the counted rounds' steps in
    order, ``rollout`` their rollouts.
    """
    arms: dict[str, dict[str, Any]] = {}
    for arm in dict.fromkeys(row["arm"] for row in found["steps"]):
        rounds = sorted((row for row in found["steps"] if row["arm"] == arm), key=lambda row: int(row["round"]))
        counted = rounds[settle:]
        medians = {
            phase: statistics.median(row.get(f"time/{phase}", 0.0) for row in counted) for phase in (*PHASES, "total")
        }
        arms[arm] = {
            "step_s": medians.pop("total"),
            **{f"{phase}_s": seconds for phase, seconds in medians.items()},
            "seconds": [row["time/total"] for row in counted],
            "rollout": [row["time/rollout"] for row in counted],
            "acceptance_first": rounds[0]["speculation/acceptance_length"],
            "acceptance_last": rounds[-1]["speculation/acceptance_length"],
            "drafter_steps": statistics.median(row.get("drafter/steps", 0.0) for row in counted),
        }
        if "spot/sessions" in counted[0]:
            arms[arm] |= _of_bubbles([*counted, *found["pairs"]])
    return arms


def _of_bubbles(rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    trained = [row for row in rows if row["spot/sessions"]]
    latencies = [row["spot/preempt_ms"] for row in trained]
    idle_s = sum(row["spot/idle_s"] for row in rows)
    return {
        "idle_s": idle_s / len(rows),
        "idle_share_used": sum(row["spot/used_s"] for row in rows) / idle_s if idle_s else 0.0,
        "bubbles": len(rows),
        "with_sessions": len(trained),
        "preempt_ms_p50": percentile(latencies, 0.5) if trained else None,
        "preempt_ms_p99": percentile(latencies, 0.99) if trained else None,
        "failed": sum(row["spot/failed"] + row["spot/cut_off"] for row in rows),
    }


def judge(result: BenchmarkResult, target: str, arms: Mapping[str, Mapping[str, Any]], pairs: Sequence[Any]) -> None:
    """Targets of one target model, with one rank per core."""
    spot = arms["SD + spot"]
    result.target(f"{target}: share of idle time that trains", spot["idle_share_used"], ">=", 0.80)
    if pairs:
        slower = slow_down(pairs, "with")["ratio"]
        result.target(f"{target}: rollout with training in the bubble over without", slower, "<=", 1.01)
    if "off" in arms:
        faster = ratio_of_medians(arms["off"]["seconds"], spot["seconds"])["ratio"]
        result.target(f"{target}: whole step, off over SD + spot", faster, ">=", 1.7)


def slow_down(pairs: Sequence[Mapping[str, float]], bubble: str) -> dict[str, float]:
    """Seconds of rollouts with training in the bubble, or with independent training, over those without."""
    return ratio_of_medians([pair[bubble] for pair in pairs], [pair["without"] for pair in pairs])


def _rows(target: str, ranks: int, found: Mapping[str, Any], arms: Mapping[str, Mapping[str, Any]]) -> list[Any]:
    about = {
        "target": target,
        "weights": found["weights"],
        "ranks": ranks,
        "for": "timing" if found["pinned"] else "behaviour",
    }
    rows = []
    for arm, measured in arms.items():
        row = {**about, "arm": arm, **measured}
        if "off" in arms:
            row["step_over_off"] = ratio_of_medians(arms["off"]["seconds"], measured["seconds"])
            row["rollout_over_off"] = ratio_of_medians(arms["off"]["rollout"], measured["rollout"])
        if arm == "SD + spot" and found["pairs"]:
            row["slow_down"] = slow_down(found["pairs"], "with")
            row["slow_down_beside_training_alone"] = slow_down(found["pairs"], "alone")
        rows.append(row)
    return rows


def run(arguments: argparse.Namespace) -> BenchmarkResult:
    """A row per target, number of ranks and arm; targets use the rows with one core per rank.

    Raises:
        ConfigError: the quickstart's model does not exist yet.
        RunError: a target's processes failed.
    """
    environment = describe_environment()
    result = BenchmarkResult(environment=environment, name="spot")
    ranks = arguments.ranks or max(2, environment["cores"])
    for target in arguments.targets:
        found = _measured(arguments, target, ranks)
        arms = summarize(found, arguments.settle)
        result.rows += _rows(target, ranks, found, arms)
        if found["pinned"] and "SD + spot" in arms:
            judge(result, target, arms, found["pairs"])
    if "quickstart" in arguments.targets:
        for more in arguments.more_ranks:
            few = {"arms": ["SD + spot"], "rounds": arguments.more_rounds, "pairs": 0}
            found = _measured(arguments, "quickstart", more, **few)
            result.rows += _rows("quickstart", more, found, summarize(found, arguments.settle))
    return result

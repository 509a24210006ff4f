"""Whole RL steps with and without tail batching, at recorded lengths: seconds per problem that a step trains on."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_tlt.bench.recorded_lengths import LAWS, RECORDED
from megatron_tlt.bench.result import BenchmarkResult, ratio_of_medians
from megatron_tlt.bench.spot import DEFAULTS
from megatron_tlt.bench.tail_simulated import MeasuredEngine, simulated_seconds
from megatron_tlt.bench.workers import measure_in_worker
from megatron_tlt.config.loader import load_config
from megatron_tlt.models.recipe import model_folder
from megatron_tlt.observe.environment import describe_environment

PERIOD = 5
"""Steps from one long round to the next, as a short round leaves a quarter of a step's problems."""
TAILS: dict[str, dict[str, Any]] = {
    "problems": {"eta_prompts": 1.25, "eta_responses": 1.0},
    "both": {"eta_prompts": 1.25, "eta_responses": 1.25},
    "continued": {"eta_prompts": 1.25, "eta_responses": 1.0, "deferred": "continue"},
}
SCHEDULES: dict[str, dict[str, Any]] = {"partial": {"kind": "partial"}, "one_step_off": {"kind": "one_step_off"}}
STREAM = "stream"
_ALONE = ("off", *TAILS, *SCHEDULES, STREAM)
_SPECULATING = ("SD", "SD + problems", "SD + both", "SD + partial", "SD + spot", "SD + spot + both")
EVERYTHING = f"SD + spot + both + {STREAM}"
ARMS = (*_ALONE, *_SPECULATING, f"SD + spot + {STREAM}", EVERYTHING)


def parts_of(arm: str) -> tuple[str, tuple[str, ...]]:
    """The arm of ``bench.spot``, and what this one adds to it: tail batching, a schedule or the stream trainer."""
    parts = arm.split(" + ")
    added = tuple(part for part in parts if part in (*TAILS, *SCHEDULES, STREAM))
    return " + ".join(part for part in parts if part not in added) or "off", added


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", type=Path, default=Path("launch/quickstart-deterministic.yaml"), help="launch config"
    )
    parser.add_argument("--model", type=Path, help="model folder (default: the config's)")
    parser.add_argument("--ranks", type=int, default=2, help="engines, one core each")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--periods", type=int, default=4, help=f"periods of {PERIOD} interleaved steps of each arm")
    parser.add_argument("--settle", type=int, default=1, help="number of the first of these that do not count")
    parser.add_argument("--prompts", type=int, default=48, help="problems per step")
    parser.add_argument("--group", type=int, default=8, help="responses per problem")
    parser.add_argument("--longest", type=int, default=0, help="tokens of the longest response; 0: as in the law")
    parser.add_argument("--law", choices=LAWS, default=RECORDED, help="response lengths; 32k needs --longest")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for all steps")


def of_periods(steps: Sequence[Mapping[str, Any]], arm: str, name: str) -> list[float]:
    """Sums of a metric over the whole periods of an arm, in order; a rest of fewer steps is left out."""
    values = [row[name] for row in sorted(steps, key=lambda row: int(row["round"])) if row["arm"] == arm]
    return [sum(values[at : at + PERIOD]) for at in range(0, len(values) - PERIOD + 1, PERIOD)]


def summarize(steps: Sequence[Mapping[str, Any]], settle: int, problems: int) -> list[dict[str, Any]]:
    """A row per arm; seconds per problem that was trained on, over the counted periods.

    ``bound`` is what the step would gain if its rollout took no time at all.
    """
    arms = list(dict.fromkeys(row["arm"] for row in steps))
    totals = {arm: of_periods(steps, arm, "time/total")[settle:] for arm in arms}
    rollouts = {arm: of_periods(steps, arm, "time/rollout")[settle:] for arm in arms}
    rows: list[dict[str, Any]] = []
    for arm in arms:
        mine = [row for row in steps if row["arm"] == arm and row["round"] >= settle * PERIOD]
        row: dict[str, Any] = {
            "arm": arm,
            "step (ms per problem)": 1e3 * sum(totals[arm]) / len(totals[arm]) / PERIOD / problems,
            "rollout (ms per problem)": 1e3 * sum(rollouts[arm]) / len(rollouts[arm]) / PERIOD / problems,
            "wasted": sum(one.get("tail/wasted", 0.0) for one in mine) / len(mine),
            "kept over all": sum(one.get("tail/kept_over_all", 1.0) for one in mine) / len(mine),
            "length": sum(one["length/mean"] for one in mine) / len(mine),
            "long rounds": sum(one.get("tail/long_round", 0.0) for one in mine) / len(mine),
            "streamed": sum(one.get("stream/share", 0.0) for one in mine) / len(mine),
        }
        if "off" in arms:
            row["step, off over it"] = ratio_of_medians(totals["off"], totals[arm])
            row["rollout, off over it"] = ratio_of_medians(rollouts["off"], rollouts[arm])
            rest = [total - rollout for total, rollout in zip(totals["off"], rollouts["off"], strict=True)]
            row["bound of the step"] = ratio_of_medians(totals["off"], rest)["ratio"]
        rows.append(row)
    return rows


def add_simulated(rows: list[dict[str, Any]], found: Mapping[str, Any], given: Mapping[str, Any], engines: int) -> None:
    """Adds what the simulation says about the arms without speculation, given the engine steps of the first arm."""
    responses, steps = given["prompts"] * given["group"], [row for row in found["steps"] if row["arm"] == "off"]
    prompt = sum(row["length/prompt_mean"] for row in steps) / len(steps)
    engine = MeasuredEngine.fitted(found["engine_steps"], prompt * responses * len(steps))
    bound = int(found["most_requests"])  # no arm had more at a time, whether an engine may have more or not

    def seconds(arm: str) -> float:
        return simulated_seconds(engine, given, engines, bound, prompt, TAILS.get(arm), SCHEDULES.get(arm))

    off = seconds("off")
    for row in rows:
        if row["arm"] in _ALONE and row["arm"] != STREAM:
            row["simulated, off over it"] = off / seconds(row["arm"])


def judge(result: BenchmarkResult) -> None:
    """The targets of the arms that were measured, against ``off``."""
    ratios = {row["arm"]: row["rollout, off over it"]["ratio"] for row in result.rows}
    for arm, least in {"problems": 1.3, "both": 1.5, EVERYTHING: 2.0}.items():
        if arm in ratios:
            result.target(f"rollout seconds per problem, off over {arm}", ratios[arm], ">=", least)
    errors = [
        abs(row["simulated, off over it"] / ratios[row["arm"]] - 1)
        for row in result.rows
        if "simulated, off over it" in row and row["arm"] != "off"
    ]
    if errors:
        result.target("largest error of the simulated ratios", max(errors), "<=", 0.15)
    if "both" in ratios:
        row = next(row for row in result.rows if row["arm"] == "both")
        saved = (1 - 1 / row["step, off over it"]["ratio"]) / (1 - 1 / row["bound of the step"])
        result.target("both: share of the saving that the bound allows", saved, ">=", 0.7)


def run(arguments: argparse.Namespace) -> BenchmarkResult:
    """A row per arm.

    Raises:
        ConfigError: the quickstart's model does not exist yet.
        RunError: the processes failed.
    """
    result = BenchmarkResult(environment=describe_environment(), name="tail")
    names = ("arms", "periods", "prompts", "group", "longest", "law", "seed")
    given = DEFAULTS["quickstart"] | {"target": "quickstart", "session_steps": 5, "warm_entries": 8}
    given |= {name: getattr(arguments, name) for name in names} | {"config": str(arguments.config)}
    given["model"] = str(arguments.model or model_folder(load_config(arguments.config, [])))
    found = measure_in_worker("tail", "tail", given, arguments.timeout, arguments.ranks)
    result.rows = summarize(found["steps"], arguments.settle, arguments.prompts)
    if "off" in arguments.arms and found["pinned"]:
        if arguments.arms[0] == "off":  # whose engine steps were measured
            add_simulated(result.rows, found, given, arguments.ranks)
        judge(result)
    return result

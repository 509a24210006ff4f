"""One rank of `tlt bench tail`: whole runs with and without tail batching, interleaved by step, in one process."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_tlt.bench.recorded_lengths import LengthsByProblem
from megatron_tlt.bench.tail import PERIOD, SCHEDULES, STREAM, TAILS, parts_of
from megatron_tlt.bench.workers.rl_steps import Position, measure_pinned, serving, steps_in_turns
from megatron_tlt.bench.workers.spot import arm_config, first_head, quickstart
from megatron_tlt.config.algorithm import CorrectionConfig
from megatron_tlt.config.schedule import ScheduleConfig
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.config.stream import StreamConfig
from megatron_tlt.config.tail import TailConfig
from megatron_tlt.observe.timeline import ENGINE_TRACK
from megatron_tlt.platform.collectives import all_gather_data
from megatron_tlt.trainer.loop import Run


def tail_config(config: TltConfig, arm: str, work: Path) -> TltConfig:
    """The config with the tail batching, schedule or stream that the arm adds, and a folder of its own."""
    changes: dict[str, Any] = {"run": config.run.model_copy(update={"dir": work / arm.replace(" ", "")})}
    if continues(arm):
        correction = CorrectionConfig(weights="token")
        changes["algorithm"] = config.algorithm.model_copy(update={"correction": correction})
    for part in parts_of(arm)[1]:
        if part in TAILS:
            changes["tail"] = TailConfig(**TAILS[part])
        elif part in SCHEDULES:
            changes["schedule"] = ScheduleConfig(**SCHEDULES[part])
        elif part == STREAM:
            changes["stream"] = StreamConfig()
    return config.model_copy(update=changes)


def continues(arm: str) -> bool:
    """Whether a step continues responses of steps before."""
    added = parts_of(arm)[1]
    return any(part in SCHEDULES or TAILS.get(part, {}).get("deferred") == "continue" for part in added)


def measure(given: Mapping[str, Any], work: Path) -> dict[str, Any]:
    target = quickstart(given, work)
    head = first_head(target, given, work)
    lengths, same = (LengthsByProblem(given["longest"], given["seed"], given["law"]) for _ in range(2))
    runs = {}
    for arm in given["arms"]:
        config = arm_config(target, head, parts_of(arm)[0], given, work)
        # a continued response has the length that it had; one that is generated anew has another of its problem's
        runs[arm] = Run(tail_config(config, arm, work), same if continues(arm) else lengths)
    positions = {arm: Position() for arm in runs}
    rows: list[dict[str, Any]] = []
    with serving(runs):
        for number in range(given["periods"] * PERIOD):
            lengths.begin(number)
            rows += steps_in_turns(runs, number, positions)
    own = {arm: engine_steps(run) for arm, run in runs.items()}
    everyone = all_gather_data(own, dict[str, list[dict[str, float]]])
    return {
        "steps": rows,
        "engine_steps": [row for part in everyone for row in part[given["arms"][0]]],
        "most_requests": max(row["batch"] for part in everyone for steps in part.values() for row in steps),
    }


def engine_steps(run: Run) -> list[dict[str, float]]:
    """This rank's engine steps; ``prefill`` is 1 for those with prompts."""
    events = [one["args"] for one in run.timeline.to_events() if one.get("track") == ENGINE_TRACK]
    return [{name: float(one[name]) for name in ("batch", "ms_per_step", "steps", "prefill")} for one in events]


def main(given: str, work: str, out: str) -> None:
    measure_pinned(given, out, lambda values: measure(values, Path(work)))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""One rank of `tlt bench tail`: whole runs with and without tail batching, interleaved by step, in one process."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_tlt.bench.recorded_lengths import LengthsByProblem
from megatron_tlt.bench.tail import ETAS, PERIOD
from megatron_tlt.bench.workers.rl_steps import Position, measure_pinned, serving, steps_in_turns
from megatron_tlt.bench.workers.spot import arm_config, first_head, quickstart
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.config.tail import TailConfig
from megatron_tlt.trainer.loop import Run


def tail_config(config: TltConfig, arm: str, work: Path) -> TltConfig:
    """The config with the tail batching that the arm's name ends in, and a folder of its own."""
    etas = ETAS.get(arm.rpartition(" + ")[2])
    run = config.run.model_copy(update={"dir": work / arm.replace(" ", "")})
    return config.model_copy(update={"run": run, "tail": None if etas is None else TailConfig(**etas)})


def measure(given: Mapping[str, Any], work: Path) -> dict[str, Any]:
    target = quickstart(given, work)
    head = first_head(target, given, work)
    lengths = LengthsByProblem(given["longest"], given["seed"])
    runs = {}
    for arm in given["arms"]:
        base = arm.removesuffix(" + both").removesuffix(" + problems")
        config = arm_config(target, head, "off" if base in ETAS else base, given, work)
        runs[arm] = Run(tail_config(config, arm, work), lengths)
    positions = {arm: Position() for arm in runs}
    rows: list[dict[str, Any]] = []
    with serving(runs):
        for number in range(given["periods"] * PERIOD):
            lengths.begin(number)
            rows += steps_in_turns(runs, number, positions)
    return {"steps": rows}


def main(given: str, work: str, out: str) -> None:
    measure_pinned(given, out, lambda values: measure(values, Path(work)))


if __name__ == "__main__":
    main(*sys.argv[1:])

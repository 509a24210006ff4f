"""One rank of `tlt bench real`'s RL steps: interleaved runs of one launch config that differ only in speculation."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_tlt.bench.real import AFTER_UPDATE, IN_BUBBLE, STEP_ARMS
from megatron_tlt.bench.workers.rl_steps import measure_pinned, serving, steps_in_turns
from megatron_tlt.config.loader import load_config
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.trainer.loop import Run


def config_of(arm: str, given: Mapping[str, Any], work: Path) -> TltConfig:
    """The launch config as given, starting from the warmed-up model and head, with the arm's changes."""
    own = list(STEP_ARMS[arm])
    if arm != "off":
        own.append(f"drafter.path={given['head']}")
    if arm == AFTER_UPDATE:
        own.append(f"drafter.session_steps={given['session_steps']}")
    if arm == IN_BUBBLE:
        own.append("spot.session_timeout_s=60")
    shared = ("model.recipe=null", f"model.path={given['model']}", f"run.dir={work / arm.replace(' ', '-')}")
    return load_config(given["config"], [*given["set"], *shared, *own])


def measure(given: Mapping[str, Any], work: Path) -> dict[str, Any]:
    """Runs the steps of all arms, interleaved."""
    runs = {arm: Run(config_of(arm, given, work)) for arm in STEP_ARMS}
    with serving(runs):
        rows = itertools.chain.from_iterable(steps_in_turns(runs, number) for number in range(given["rounds"]))
        return {"steps": list(rows), "pairs": []}


def main(given_json: str, work: str, out: str) -> None:
    measure_pinned(given_json, out, lambda given: measure(given, Path(work)))


if __name__ == "__main__":
    main(*sys.argv[1:])

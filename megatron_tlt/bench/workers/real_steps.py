"""One rank of `tlt bench real`'s RL steps: runs of one launch config that differ in speculation alone, in turns."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_tlt.bench.real import AFTER_UPDATE, IN_BUBBLE, STEP_ARMS
from megatron_tlt.bench.workers.rl_steps import pin_to_core, ranks_are_pinned, serving, steps_in_turns
from megatron_tlt.config.loader import load_config
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.platform.device import barrier, initialize_distributed, prepare, rank
from megatron_tlt.platform.files import atomic_write_text
from megatron_tlt.platform.processes import die_with_parent
from megatron_tlt.trainer.loop import Run


def config_of(arm: str, given: Mapping[str, Any], work: Path) -> TltConfig:
    """The launch config as given, from the warmed-up model and head on, with what the arm changes."""
    own = list(STEP_ARMS[arm])
    if arm != "off":
        own.append(f"drafter.path={given['head']}")
    if arm == AFTER_UPDATE:
        own.append(f"drafter.session_steps={given['session_steps']}")
    if arm == IN_BUBBLE:
        own.append("spot.session_timeout_s=60")
    shared = ("model.recipe=null", f"model.path={given['model']}", f"run.dir={work / arm.replace(' ', '-')}")
    return load_config(given["config"], [*given["set"], *shared, *own])


def main(given_json: str, work: str, out: str) -> None:
    die_with_parent(signal.SIGKILL)
    given = json.loads(given_json)
    pin_to_core(int(os.environ["LOCAL_WORLD_SIZE"]))
    prepare()
    initialize_distributed(600)
    runs = {arm: Run(config_of(arm, given, Path(work))) for arm in STEP_ARMS}
    with serving(runs):
        rows = list(itertools.chain.from_iterable(steps_in_turns(runs, number) for number in range(given["rounds"])))
    pinned = ranks_are_pinned()
    if rank() == 0:
        atomic_write_text(Path(out), json.dumps({"steps": rows, "pairs": [], "pinned": pinned}))
    barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])

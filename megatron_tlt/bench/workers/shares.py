"""One rank of `tlt bench shares`: runs with even shares and with shares by speed, interleaved, in one process."""

from __future__ import annotations

import contextlib
import itertools
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_tlt.bench.recorded_lengths import RecordedLengths
from megatron_tlt.bench.shares import ARMS
from megatron_tlt.bench.workers.rl_steps import measure_pinned, serving, steps_in_turns, tell
from megatron_tlt.config.loader import load_config
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.platform.collectives import all_gather_data
from megatron_tlt.platform.device import barrier, rank, world_size
from megatron_tlt.tasks.mixture import build_sources
from megatron_tlt.trainer.loop import Run
from megatron_tlt.trainer.supervised import write_start

SLOW_RANK = 1
_WORK_S = 0.5
_BUSY = (
    "from megatron_tlt.platform.processes import die_with_parent\n"
    "die_with_parent({signum})\n"
    "print('busy', flush=True)\n"
    "while True: pass\n"
)


def arm_config(given: Mapping[str, Any], model: Path, arm: str, work: Path) -> TltConfig:
    """The config of an arm: an engine and a replica on each rank, without speculation."""
    speeds = [1.0] * world_size()
    speeds[SLOW_RANK] = 1 / (1 + given["competitors"])
    overrides = {
        "model.recipe": "null",
        "model.path": model,
        "launcher.nproc_per_node": world_size(),
        "run.dir": work / arm.replace(" ", ""),
        "run.seed": given["seed"],
        "run.deterministic": "false",
        "speculation.enabled": "false",
        "trainer.prompts_per_step": given["prompts"],
        "algorithm.group_size": given["group"],
        "reshard.verify_every": 0,
        "speeds": "null" if arm == "even" else speeds,
    }
    return load_config(given["config"], [f"{key}={value}" for key, value in overrides.items()])


def first_model(given: Mapping[str, Any], work: Path) -> Path:
    """The given folder, or the recipe's model before its warm-up: lengths are set, so it need not answer well."""
    if given["model"] is not None:
        return Path(given["model"])
    if rank() == 0:
        config = load_config(given["config"], ["launcher.nproc_per_node=1"])
        write_start(config, build_sources(config.tasks, "train", config.run.seed), work / "model")
    barrier()
    return work / "model"


@contextlib.contextmanager
def slow_rank(competitors: int) -> Iterator[None]:
    """Busy processes of equal priority share the core of the slow rank, which they get from it."""
    code = _BUSY.format(signum=int(signal.SIGKILL))
    busy = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        for _ in range(competitors if rank() == SLOW_RANK else 0)
    ]
    try:
        for process in busy:
            assert process.stdout is not None
            process.stdout.readline()
        barrier()
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def fixed_work(seconds: float) -> int:
    """How many products of matrices take so long here, without a competitor."""
    matrix, began, number = torch.ones(128, 128), time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        matrix @ matrix
        number += 1
    return number


def time_of_work(number: int) -> list[float]:
    """Seconds of each rank for the same work, all at once."""
    matrix = torch.ones(128, 128)
    barrier()
    began = time.perf_counter()
    for _ in range(number):
        matrix @ matrix
    return all_gather_data(time.perf_counter() - began, float)


def measure(given: Mapping[str, Any], work: Path) -> dict[str, Any]:
    model = first_model(given, work)
    lengths = RecordedLengths(given["prompts"], given["group"], given["longest"], given["seed"])
    configs = {arm: arm_config(given, model, arm, work) for arm in ARMS}
    runs = {arm: Run(config, lengths) for arm, config in configs.items()}
    number = min(all_gather_data(fixed_work(_WORK_S), int))
    steps, times = [], []
    with serving(runs), slow_rank(given["competitors"]):
        for at in range(given["rounds"]):
            lengths.begin(at)
            times.append(time_of_work(number))
            tell(f"round {at + 1}: the slow rank takes {times[-1][SLOW_RANK] / times[-1][0]:.2f} times as long")
            steps.append(steps_in_turns(runs, at))
    speeds = {arm: config.speeds.actor if config.speeds is not None else None for arm, config in configs.items()}
    return {"steps": list(itertools.chain.from_iterable(steps)), "work": times, "speeds": speeds}


def main(given: str, work: str, out: str) -> None:
    measure_pinned(given, out, lambda values: measure(values, Path(work)))


if __name__ == "__main__":
    main(*sys.argv[1:])

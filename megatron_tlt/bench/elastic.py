"""From the kill of a rank to the next update: restarts from memory and from checkpoints, of forks or not; resumable.

Also the time that copies into memory take of each step, and the bits of training under many layouts.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_tlt.bench.elastic_layouts import measure_layouts, rows_of, worst
from megatron_tlt.bench.outside import ranks_below
from megatron_tlt.bench.result import BenchmarkResult, ratio_of_medians
from megatron_tlt.bench.training_runs import kept_result
from megatron_tlt.checkpoint.memory_slots import DATA
from megatron_tlt.config.loader import load_config
from megatron_tlt.errors import ConfigError, RunError
from megatron_tlt.observe.environment import describe_environment
from megatron_tlt.observe.metrics import METRICS_FILE, read_metrics, recorded_steps
from megatron_tlt.planning.job import job_of
from megatron_tlt.planning.snapshots import snapshot_bytes
from megatron_tlt.platform.files import atomic_write_text
from megatron_tlt.platform.memory_folder import memory_folder_of
from megatron_tlt.platform.preload import NOT_FORKED

_CHECKPOINT = ["trainer.save_every=1", "trainer.async_save=false"]
_MEMORY = ["trainer.save_every=0", "elastic={}"]
ARMS: dict[str, list[str]] = {
    "checkpoint": [*_CHECKPOINT, "launcher.preload=false"],
    "memory": [*_MEMORY, "launcher.preload=false"],
    "checkpoint, forks": [*_CHECKPOINT, "launcher.preload=true"],
    "memory, forks": [*_MEMORY, "launcher.preload=true"],
}
_PER_BATCH = 2
"""Updates on each batch of the training under many layouts."""
_INTO_STEP_S = 1.0
_POLL_S = 0.02
_TIMEOUT_S = 1800.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, default=Path("launch/quickstart-deterministic.yaml"))
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of the config")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="what to restart from")
    parser.add_argument("--repeats", type=int, default=5, help="interleaved repeats (%(default)s)")
    parser.add_argument(
        "--killed-after",
        type=int,
        default=8,
        help="the step before the one in which a rank is killed, at least 2: by then both slots of snapshots and the "
        "process to fork from must be there (%(default)s)",
    )
    parser.add_argument("--updates", type=int, default=50, help="updates under each layout; 0: none (%(default)s)")
    parser.add_argument("--folder", type=Path, default=Path("runs/elastic"), help="folder of the runs")
    parser.add_argument("--minutes", type=float, default=60.0, help="start no later run; run again for the rest")


def run(arguments: argparse.Namespace) -> BenchmarkResult:
    """A row per run and layout.

    Targets, of the time from a kill to the next update after a restart from a checkpoint: 0.9 from memory, 0.5 from
    memory with forks; copies into memory in 1 % of a step; the memory that `tlt plan` says; equal bits under
    all layouts.

    Raises:
        ConfigError: an existing result has other settings, or a rank is to be killed before both slots are there.
        RunError: a run failed.
    """
    if arguments.killed_after < 2:
        raise ConfigError(f"--killed-after: found {arguments.killed_after}; allowed: at least 2")
    began = time.monotonic()
    found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arguments.arms}
    own = [f"killed after {arguments.killed_after}", str(arguments.config), *arguments.set]
    for repeat in range(arguments.repeats):
        for arm in found:
            name = arm.replace(", ", "-")
            out = arguments.folder / f"{name}-{repeat}.json"
            config = load_config(arguments.config, [*arguments.set, *ARMS[arm]])
            if not kept_result(out, [*own, *ARMS[arm]], config):
                if time.monotonic() - began > 60 * arguments.minutes:
                    continue
                measured = _killed(arguments, arm, arguments.folder / f"{name}-{repeat}")
                atomic_write_text(out, json.dumps(measured))
            found[arm].append(json.loads(out.read_text(encoding="utf-8")))
    layouts = None
    out = arguments.folder / "layouts.json"
    if arguments.updates and (
        kept_result(out, [str(arguments.updates)]) or time.monotonic() - began < 60 * arguments.minutes
    ):
        if not out.is_file():
            atomic_write_text(out, json.dumps(measure_layouts(arguments.updates // _PER_BATCH, _PER_BATCH, _TIMEOUT_S)))
        layouts = json.loads(out.read_text(encoding="utf-8"))
    return judge(found, arguments.repeats, layouts, with_layouts=arguments.updates > 0)


def _killed(arguments: argparse.Namespace, arm: str, folder: Path) -> dict[str, Any]:
    shutil.rmtree(folder, ignore_errors=True)
    after: int = arguments.killed_after
    own = [f"run.dir={folder}", f"trainer.steps={after + 1}", "evaluation.every=0", "observe.progress=false"]
    config = load_config(arguments.config, [*arguments.set, *ARMS[arm], *own])
    command = [sys.executable, "-m", "megatron_tlt", "train", str(arguments.config), *arguments.set, *ARMS[arm], *own]
    with (folder.with_suffix(".log")).open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            _wait_for(folder, after, process)
            time.sleep(_INTO_STEP_S)
            ranks = ranks_below(process.pid)
            in_memory = 0
            if config.elastic is not None:
                snapshots = memory_folder_of(config.elastic.memory_dir, folder, 0)
                in_memory = sum(file.stat().st_size for file in snapshots.rglob(DATA))
            killed = time.perf_counter()
            ranks[max(ranks)].kill()
            _wait_for(folder, after + 1, process)
            seconds = time.perf_counter() - killed
            if process.wait(_TIMEOUT_S):
                raise RunError(f"a run failed; its output is in {log.name}")
        finally:
            process.kill()
    if "forks" in arm and NOT_FORKED in (folder / "logs" / "workers.log").read_text(encoding="utf-8"):
        raise RunError(f"{folder}: its ranks were no forks; logs/workers.log says why")
    rows = [row for row in read_metrics(folder / METRICS_FILE) if row["step"]]
    return {
        "seconds": seconds,
        "bytes": in_memory,
        "planned_bytes": snapshot_bytes(job_of(config)) if config.elastic is not None else 0.0,
        "steps": [row["time/total"] for row in rows],
        "copies": [row["time/snapshot"] for row in rows if "time/snapshot" in row],
    }


def _wait_for(folder: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    """Until the run has recorded a step."""
    deadline = time.monotonic() + _TIMEOUT_S
    while recorded_steps(folder) < step:
        if process.poll() is not None or time.monotonic() > deadline:
            raise RunError(f"{folder}: the run ended before step {step}, or took longer than {_TIMEOUT_S:.0f} s")
        time.sleep(_POLL_S)


def judge(
    found: Mapping[str, Sequence[Mapping[str, Any]]],
    repeats: int,
    layouts: Mapping[str, Any] | None = None,
    with_layouts: bool = True,
) -> BenchmarkResult:
    """Rows of what has run, and targets of the arms that were asked for, when all repeats have."""
    result = BenchmarkResult(environment=describe_environment(), name="elastic")
    for arm, rows in found.items():
        for repeat, row in enumerate(rows):
            copies = statistics.median(row["copies"]) if row["copies"] else None
            result.rows.append(
                {
                    "restart from": arm,
                    "repeat": repeat,
                    "kill to next update (s)": row["seconds"],
                    "step (s)": statistics.median(row["steps"]),
                    "copy (ms)": None if copies is None else 1e3 * copies,
                    "memory (MB)": row["bytes"] / 1e6,
                    "planned (MB)": row["planned_bytes"] / 1e6,
                }
            )
    bits = "tensors with other bits, at most, under any layout"
    if layouts is None:
        if with_layouts:
            result.incomplete(bits)
    else:
        rows_of_layouts = rows_of(layouts)
        result.rows += rows_of_layouts
        result.target(bits, worst(rows_of_layouts), "==", 0)
    complete = all(len(rows) == repeats for rows in found.values()) and repeats > 1
    copied, memory = "copies into memory, share of a step", "memory of snapshots, difference from the plan"
    for arm, least in (("memory", 0.9), ("memory, forks", 0.5)):
        ratio = f"{arm} over checkpoint"
        if arm not in found or "checkpoint" not in found:
            continue
        if not complete:
            result.incomplete(f"kill to next update, {ratio}")
            continue
        spread = ratio_of_medians(*([row["seconds"] for row in found[each]] for each in (arm, "checkpoint")))
        result.target(f"kill to next update, {ratio}", spread["ratio"], "<=", least)
        result.rows.append({"restart from": ratio, **spread})
    rows = found.get("memory", ())
    if "memory" in found and len(rows) < repeats:
        result.incomplete(copied)
        result.incomplete(memory)
    elif rows:
        shares = [copy / step for row in rows for copy, step in zip(row["copies"], row["steps"], strict=False)]
        result.target(copied, statistics.median(shares), "<=", 0.01)
        result.target(memory, max(abs(row["bytes"] / row["planned_bytes"] - 1) for row in rows), "<=", 0.05)
    return result

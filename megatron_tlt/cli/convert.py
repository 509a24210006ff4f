"""``tlt convert SOURCE TARGET``: converts a Hugging Face folder to a Megatron distributed checkpoint, or back."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from megatron_tlt.cli.launch import launch, under_torchrun
from megatron_tlt.config.schema import LauncherConfig
from megatron_tlt.errors import ConfigError, TltError

_WORKER = "megatron_tlt.cli.workers.convert"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("convert", help="convert a model between Hugging Face and Megatron formats (detected)")
    parser.add_argument("source", type=Path, help="a Hugging Face folder, or a Megatron checkpoint (also a run's)")
    parser.add_argument("target", type=Path, help="output folder; must not exist")
    parser.add_argument("--processes", type=int, default=1, help="number of processes (under torchrun: its processes)")
    parser.add_argument("--nodes", type=int, default=1, help="nodes with --processes each (slurm/convert.sbatch)")
    parser.add_argument("--no-verify", action="store_true", help="do not compare the source with its manifest")
    parser.add_argument("--side-files", type=Path, help="config and tokenizer, if the Megatron checkpoint has none")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    for option in ("processes", "nodes"):
        if getattr(arguments, option) < 1:
            raise ConfigError(f"--{option}: found {getattr(arguments, option)}; allowed: at least 1")
    verify = "" if arguments.no_verify else "verify"
    values = [str(arguments.source), str(arguments.target), str(arguments.side_files or ""), verify]
    if under_torchrun():
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, "-m", _WORKER, *values])
    launcher = LauncherConfig(nnodes=arguments.nodes, nproc_per_node=arguments.processes)
    log: Path | None = None
    if not arguments.traceback:  # torchrun repeats a worker's error at length
        descriptor, name = tempfile.mkstemp(prefix="tlt-convert-", suffix=".log")
        os.close(descriptor)
        log = Path(name)
    try:
        status = launch(_WORKER, values, launcher, log=log, keep_log=False)
    except TltError:
        if log is not None:
            log.unlink()
        raise
    if status == 0:
        print(f"written: {arguments.target}")
    return status

"""``tlt rollout CONFIG --out FOLDER [key.path=value ...]``: records responses of training steps without training."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_tlt.cli import preflight, runs
from megatron_tlt.cli.evaluate import checkpoint_folder
from megatron_tlt.errors import ConfigError


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("rollout", help="record responses of training steps without training")
    runs.add_config_arguments(parser)
    parser.add_argument("--out", metavar="FOLDER", type=Path, required=True, help="a new or empty folder")
    parser.add_argument("--steps", type=int, default=1, help="number of training steps to record (%(default)s)")
    parser.add_argument("--checkpoint", metavar="PATH|N", help="a checkpoint's folder or a step (default: newest)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    out: Path = arguments.out.resolve()
    if arguments.steps < 1:
        raise ConfigError(f"--steps: found {arguments.steps}; allowed: 1 or more")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out: {out} is not an empty folder; allowed: a new or empty folder")
    config = preflight.load_checked(arguments.config, arguments.overrides, trains=False)
    for section in ("tail", "schedule"):
        if getattr(config, section) is not None:
            raise ConfigError(
                f"{section}: found a section, with which responses are ended early; allowed for tlt rollout: "
                f"{section}=null"
            )
    checkpoint = None if arguments.checkpoint is None else checkpoint_folder(arguments.checkpoint, config.run.dir)
    request = {"out": str(out), "steps": arguments.steps, "checkpoint": checkpoint}
    return runs.start_beside("rollout", "rollout", config, request, show=arguments.traceback)

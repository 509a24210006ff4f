"""``tlt calibrate CONFIG --out FILE [key.path=value ...]``: how often the policy solves its tasks' problems."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from megatron_tlt.cli import preflight, runs
from megatron_tlt.cli.evaluate import check_writable, checkpoint_folder
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.errors import ConfigError


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("calibrate", help="measure which problems are easy, medium and hard")
    runs.add_config_arguments(parser)
    parser.add_argument(
        "--out", metavar="FILE", required=True, help="the file of pass rates to write (tasks[].tier_file)"
    )
    parser.add_argument("--problems", type=int, default=1500, help="different problems of each task (%(default)s)")
    parser.add_argument("--split", choices=("train", "held_out"), default="train", help="which problems (%(default)s)")
    parser.add_argument("--samples", type=int, default=8, help="responses to each (%(default)s)")
    parser.add_argument("--checkpoint", metavar="PATH|N", help="a checkpoint's folder or a step (default: newest)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    for option in ("problems", "samples"):
        if (found := getattr(arguments, option)) < 1:
            raise ConfigError(f"--{option}: found {found}; allowed: 1 or more")
    config = preflight.load_checked(arguments.config, arguments.overrides, trains=False, of_interest=_without_pools)
    from megatron_tlt.trainer.calibration import CalibrationRequest

    if all(task.kind == "file" for task in config.tasks):
        raise ConfigError(
            "tasks: all are of kind 'file', which takes no tier_mix; allowed for tlt calibrate: another kind"
        )
    check_writable("--out", Path(arguments.out), config.run.dir)
    checkpoint = None if arguments.checkpoint is None else checkpoint_folder(arguments.checkpoint, config.run.dir)
    out = str(Path(arguments.out).resolve())
    request = CalibrationRequest(out, arguments.problems, arguments.samples, checkpoint, arguments.split)
    return runs.start_beside("calibrate", "calibrate", config, asdict(request), show=arguments.traceback)


def _without_pools(config: TltConfig) -> TltConfig:
    """The config without the pools that the file is for, which may not exist yet."""
    sets = [
        one.model_copy(update={"tasks": [task.without_pool for task in one.tasks]}) for one in config.evaluation.sets
    ]
    evaluation = config.evaluation.model_copy(update={"sets": sets})
    return config.model_copy(update={"tasks": [task.without_pool for task in config.tasks], "evaluation": evaluation})

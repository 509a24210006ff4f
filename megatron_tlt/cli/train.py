"""``tlt train CONFIG [key.path=value ...]``: starts a run, or resumes the one in its folder."""

from __future__ import annotations

import argparse
import contextlib
import os

from megatron_tlt.cli import preflight, runs
from megatron_tlt.cli.launch import under_torchrun
from megatron_tlt.cli.prompt_files import check_prompt_files
from megatron_tlt.cli.run_lock import RunLock
from megatron_tlt.config.loader import dump_resolved
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.errors import ConfigError
from megatron_tlt.observe.speculation_gain import RunGain
from megatron_tlt.observe.summary import SUMMARY_FILE, read_summary
from megatron_tlt.platform.nodes import node_index


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("train", help="train a model; the same command again resumes the run")
    runs.add_config_arguments(parser)
    parser.add_argument("--fresh", action="store_true", help="remove the run's files from its folder and start anew")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    config = preflight.load_checked(arguments.config, arguments.overrides)
    if under_torchrun():
        return _as_rank(config, arguments)
    if arguments.fresh and config.launcher.nnodes > 1:
        raise ConfigError("--fresh: not allowed on several nodes; remove the run's folder before the launch")
    with contextlib.closing(RunLock(config.run.dir)) if node_index() == 0 else contextlib.nullcontext():
        return _launch(config, arguments)


def _launch(config: TltConfig, arguments: argparse.Namespace) -> int:
    if arguments.fresh:
        runs.clear_run(config.run.dir)
    resolved = runs.write_resolved(config)
    if runs.is_finished(config):
        print(f"finished already: {config.run.dir} (--fresh starts anew)")
        return 0
    check_prompt_files(config)
    if node_index() == 0:
        print(_first_line(config), flush=True)
    status = runs.ensure_model(config, resolved, show=arguments.traceback)
    if status == 0:
        status = runs.start("megatron_tlt.cli.workers.train", config, resolved, show=arguments.traceback, resumes=True)
    if status == 0 and node_index() == 0:
        for name in ("summary.json", "report.html"):
            if (config.run.dir / name).is_file():
                print(f"{name}: {config.run.dir / name}")
        summary = config.run.dir / SUMMARY_FILE
        if summary.is_file() and (line := RunGain.line(read_summary(summary))):
            print(line)
    return status


def _first_line(config: TltConfig) -> str:
    launcher, (_, saved) = config.launcher, runs.progress(config.run.dir)
    processes = f"{launcher.world_size} process(es)" + (f" on {launcher.nnodes} nodes" if launcher.nnodes > 1 else "")
    start = f"the checkpoint of step {saved}" if saved else "step 0"
    return f"run {config.run.name}: {processes}, folder {config.run.dir}, from {start}"


def _as_rank(config: TltConfig, arguments: argparse.Namespace) -> int:
    """Turns a torchrun process into the worker; each reads its own config file, so none waits.

    Rank 0 takes the run's lock and keeps it, as the worker runs in the same process.
    """
    if arguments.fresh:
        raise ConfigError("--fresh: not allowed under torchrun; remove the run's folder before the launch")
    if os.environ["RANK"] == "0":
        RunLock(config.run.dir).keep_over_exec()
        runs.write_resolved(config)
        check_prompt_files(config)
    own = config.run.dir / "logs" / f"config.rank{os.environ['RANK']}.yaml"
    runs.write_in_run(own, dump_resolved(config))
    return runs.start("megatron_tlt.cli.workers.train", config, own, show=arguments.traceback)

"""``tlt train CONFIG [key.path=value ...]``: starts a run, or goes on with the one in its folder."""

from __future__ import annotations

import argparse
import os

from megatron_tlt.cli import runs
from megatron_tlt.cli.launch import under_torchrun
from megatron_tlt.config.loader import dump_resolved, load_config
from megatron_tlt.config.model import require_model_folder
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.errors import ConfigError
from megatron_tlt.platform.files import atomic_write_text
from megatron_tlt.platform.nodes import node_index


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("train", help="train a model; the same command again goes on where it stopped")
    runs.add_config_arguments(parser)
    parser.add_argument("--fresh", action="store_true", help="remove what the run's folder holds and begin anew")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.config, arguments.overrides)
    require_model_folder(config)
    if under_torchrun():
        return _as_rank(config, arguments)
    if arguments.fresh:
        runs.clear_run(config.run.dir)
    resolved = runs.write_resolved(config)
    if runs.is_finished(config):
        print(f"finished already: {config.run.dir} (--fresh begins anew)")
        return 0
    status = runs.ensure_model(config, resolved, show=arguments.traceback)
    if status == 0:
        status = runs.start("megatron_tlt.cli.workers.train", config, resolved, show=arguments.traceback, resumes=True)
    if status == 0 and node_index() == 0:
        for name in ("summary.json", "report.html"):
            if (config.run.dir / name).is_file():
                print(f"{name}: {config.run.dir / name}")
    return status


def _as_rank(config: TltConfig, arguments: argparse.Namespace) -> int:
    """One of torchrun's processes becomes the worker; each reads a file of its own, so none waits."""
    if arguments.fresh:
        raise ConfigError("--fresh: not allowed under torchrun; remove the run's folder before the launch")
    if os.environ["RANK"] == "0":
        runs.write_resolved(config)
    own = config.run.dir / "logs" / f"config.rank{os.environ['RANK']}.yaml"
    own.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_text(own, dump_resolved(config))
    return runs.start("megatron_tlt.cli.workers.train", config, own, show=arguments.traceback)

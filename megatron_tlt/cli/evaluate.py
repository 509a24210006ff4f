"""``tlt eval CONFIG [key.path=value ...]``: held-out evaluation of a config's model."""

from __future__ import annotations

import argparse

from megatron_tlt.cli import runs
from megatron_tlt.config.loader import dump_resolved, load_config
from megatron_tlt.config.model import require_model_folder
from megatron_tlt.platform.files import atomic_write_text
from megatron_tlt.platform.nodes import node_index


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("eval", help="evaluate a model on the held-out problems")
    runs.add_config_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.config, arguments.overrides)
    require_model_folder(config)
    # Not config.resolved.yaml: that one belongs to the run itself, and says what a resumed run must agree with.
    own = f".node{node_index()}" if config.launcher.nnodes > 1 else ""
    resolved = config.run.dir / "logs" / f"config.eval{own}.yaml"
    resolved.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_text(resolved, dump_resolved(config))
    status = runs.ensure_model(config, resolved, show=arguments.traceback)
    if status == 0:
        status = runs.start("megatron_tlt.cli.workers.evaluate", config, resolved, show=arguments.traceback)
    return status

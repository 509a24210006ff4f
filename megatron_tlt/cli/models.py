"""``tlt models``: the shipped launch configs, the models known by name, and the supported architectures."""

from __future__ import annotations

import argparse

from rich.console import Console

from megatron_tlt.cli.plan_tables import size_of, table_of
from megatron_tlt.config.loader import load_config
from megatron_tlt.config.shipped import shipped
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.architecture import sizes_of
from megatron_tlt.models.families import FAMILIES
from megatron_tlt.planning.model_size import ModelSize


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("models", help="list the shipped launch configs, models and architectures")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    console = Console(highlight=False)
    table = table_of(
        "launch configs: tlt plan NAME, tlt train NAME", "name", "parameters", "processes", "response tokens"
    )
    missing = []
    for name in shipped():
        try:
            config = load_config(name, check_libraries=False)
            parameters = size_of(ModelSize.of(sizes_of(config)[0]).parameters)
        except ConfigError as error:
            table.add_row(name, "-", "-", "-")
            missing.append(f"{name}: {str(error).partition(': ')[2]}")
            continue
        processes, tokens = (
            f"{config.launcher.nnodes} x {config.launcher.nproc_per_node}",
            config.rollout.max_response_tokens,
        )
        table.add_row(name, parameters, processes, f"{tokens:,}")
    console.print(table)
    for line in missing:
        console.print(line)
    console.print(f"models that `tlt init --model` knows by name: {', '.join(shipped('architectures'))}")
    console.print(f"any Hugging Face folder whose config.json has one of these as model_type: {', '.join(FAMILIES)}")
    return 0

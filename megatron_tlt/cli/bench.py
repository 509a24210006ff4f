"""``tlt bench NAME --json FILE``: runs a benchmark, prints its table, writes its JSON."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

# Name to module; a module has ``add_arguments(parser)`` (optional) and ``run(arguments) -> BenchmarkResult``.
_NAMES = (
    "algorithms",
    "checkpoint",
    "conversion",
    "coordinator",
    "data-plane",
    "drafter",
    "drafter-checkpoint",
    "drafter-grid",
    "drafter-packing",
    "elastic",
    "export-drafter",
    "families",
    "faults",
    "gap",
    "graph-pool",
    "hetero",
    "layouts",
    "learning",
    "less",
    "optimizers",
    "packing",
    "plan",
    "real",
    "reshard",
    "rollout",
    "router",
    "schedules",
    "shares",
    "simulate",
    "speculation",
    "spot",
    "suffix",
    "tail",
    "tuner",
)
BENCHMARKS = {name: f"megatron_tlt.bench.{name.replace('-', '_')}" for name in _NAMES}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("bench", help="run a benchmark; `tlt bench --help` lists them")
    parser.add_argument("name", metavar="NAME", choices=sorted(BENCHMARKS), help=", ".join(sorted(BENCHMARKS)))
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the result here")
    # arguments that this parser does not know go to the benchmark's parser
    parser.set_defaults(run=run, rest=[])


def run(arguments: argparse.Namespace) -> int:
    module = importlib.import_module(BENCHMARKS[arguments.name])
    own = argparse.ArgumentParser(prog=f"tlt bench {arguments.name}")
    if hasattr(module, "add_arguments"):
        module.add_arguments(own)
    # a benchmark that can continue keeps its measurements beside the file
    result = module.run(own.parse_args(arguments.rest, argparse.Namespace(json=arguments.json)))
    result.print()
    if arguments.json is not None:
        result.write(arguments.json)
    return 0

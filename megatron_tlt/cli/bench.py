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
    parser = commands.add_parser(
        "bench", help="run a benchmark; `tlt bench --help` lists them", add_help=False, usage="tlt bench NAME [options]"
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help=", ".join(sorted(BENCHMARKS)))
    parser.add_argument("-h", "--help", action="store_true", help="show this; with NAME, the benchmark's own options")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the result here")
    # arguments that this parser does not know go to the benchmark's parser
    parser.set_defaults(run=run, rest=[], bench=parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.name not in BENCHMARKS:
        if arguments.name is None and arguments.help:
            arguments.bench.print_help()
            return 0
        found = "nothing" if arguments.name is None else repr(arguments.name)
        arguments.bench.error(f"NAME: found {found}; allowed: {', '.join(sorted(BENCHMARKS))}")
    module = importlib.import_module(BENCHMARKS[arguments.name])
    own = argparse.ArgumentParser(prog=f"tlt bench {arguments.name}", description=(module.__doc__ or "").strip())
    own.add_argument("--json", metavar="FILE", help="write the result here")
    if hasattr(module, "add_arguments"):
        module.add_arguments(own)
    if arguments.help:
        own.print_help()
        return 0
    # a benchmark that can continue keeps its measurements beside the file
    result = module.run(own.parse_args(arguments.rest, argparse.Namespace(json=arguments.json)))
    result.print()
    if arguments.json is not None:
        result.write(arguments.json)
    return 0

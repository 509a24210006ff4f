"""``tlt compare RUN_DIR RUN_DIR...``: a page with the runs' curves, final figures and differing keys."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_tlt.cli.runs import check_run_folder
from megatron_tlt.errors import ConfigError


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("compare", help="compare runs on one page")
    parser.add_argument("run_dirs", metavar="RUN_DIR", type=Path, nargs="+", help="two runs or more")
    parser.add_argument("--out", metavar="FILE", type=Path, default=Path("compare.html"), help="page to write")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from megatron_tlt.observe.compare import MAX_RUNS, write_comparison

    folders: list[Path] = arguments.run_dirs
    if not 2 <= len(folders) <= MAX_RUNS:
        raise ConfigError(f"RUN_DIR: found {len(folders)}; allowed: 2 to {MAX_RUNS} runs")
    for folder in folders:
        check_run_folder(folder)
    print(write_comparison(folders, arguments.out))
    return 0

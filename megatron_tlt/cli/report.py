"""``tlt report RUN_DIR``: renders report.html again from what a run's folder holds."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("report", help="render report.html from a run's folder")
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path)
    parser.add_argument("--traceback", action="store_true", help="show a traceback with an error")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from megatron_tlt.observe.report import write_report

    print(f"report.html: {write_report(arguments.run_dir)}")
    return 0

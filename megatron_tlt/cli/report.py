"""``tlt report RUN_DIR``: renders report.html again from a run's folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_tlt.errors import ConfigError


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("report", help="render report.html from a run's folder")
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from megatron_tlt.observe.report import write_report
    from megatron_tlt.observe.report_data import RUN_FILES

    folder = arguments.run_dir
    if folder.is_dir() and not any((folder / name).is_file() for name in RUN_FILES):
        raise ConfigError(f"RUN_DIR: {folder} holds no run; allowed: a folder with one of {', '.join(RUN_FILES)}")
    print(f"report.html: {write_report(arguments.run_dir)}")
    return 0

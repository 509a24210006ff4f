"""``tlt report RUN_DIR``: renders report.html again from a run's folder, once or whenever the run has gone on."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path

from megatron_tlt.cli.interrupts import interrupts
from megatron_tlt.cli.runs import check_run_folder


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("report", help="render report.html from a run's folder")
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path)
    parser.add_argument(
        "--watch",
        metavar="SECONDS",
        type=_seconds,
        nargs="?",
        const=10,
        help="render again after every so many seconds in which the run has gone on (10); the page reloads",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    folder, every = arguments.run_dir, arguments.watch
    check_run_folder(folder)
    with interrupts() if every is not None else nullcontext() as wait:
        from megatron_tlt.observe.report import write_report
        from megatron_tlt.observe.report_data import METRICS_FILE

        print(f"report.html: {write_report(folder, every)}", flush=True)
        metrics, seen = folder / METRICS_FILE, None
        while wait is not None and not wait(every):
            now = metrics.stat().st_mtime_ns if metrics.is_file() else None
            if now != seen:
                write_report(folder, every)
                seen = now
    return 0


def _seconds(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}; allowed: a number of seconds from 1 on")
    return int(text)

"""``tlt watch RUN_DIR``: follows a run in the terminal, on any machine that sees its folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_tlt.cli.interrupts import interrupts
from megatron_tlt.cli.runs import check_run_folder


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("watch", help="follow a run in the terminal")
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path)
    parser.add_argument("--once", action="store_true", help="print the page once")
    parser.add_argument("--every", metavar="SECONDS", type=float, default=2.0, help="seconds between pages (2)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    with interrupts() as wait:
        from rich.console import Console
        from rich.live import Live

        from megatron_tlt.observe.watch import RunPage

        check_run_folder(arguments.run_dir)
        page, console = RunPage(arguments.run_dir), Console()
        if arguments.once:
            console.print(page.render())
            return 0
        with Live(page.render(), console=console, auto_refresh=False) as live:
            while not wait(arguments.every):
                live.update(page.render(), refresh=True)
    return 0

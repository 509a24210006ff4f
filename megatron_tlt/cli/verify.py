"""``tlt verify RUN_DIR``: verifies checkpoints, exports and records of a run, also beside the live run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_tlt.cli.runs import check_run_folder, write_json
from megatron_tlt.errors import ConfigError

if TYPE_CHECKING:
    from megatron_tlt.checkpoint.run_folder import RunItem


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("verify", help="verify the checkpoints and records in a run's folder")
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path)
    parser.add_argument("--json", metavar="F", type=Path, help="also write the items and their problems to this file")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import Progress

    from megatron_tlt.checkpoint.manifest import FileSum, sha256_sums
    from megatron_tlt.checkpoint.run_folder import verify_run

    folder: Path = arguments.run_dir
    if not folder.is_dir():
        raise ConfigError(f"RUN_DIR: found {folder}, which is no folder; allowed: a run's folder")
    check_run_folder(folder)
    items: list[RunItem] = []
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not sys.stderr.isatty()) as progress:

        def sums(files: Sequence[Path]) -> list[FileSum]:
            label = str(files[0].parent) if files else ""
            task = progress.add_task(label, total=sum(file.stat().st_size for file in files if file.is_file()))
            try:
                return sha256_sums(files, lambda size: progress.advance(task, size))
            finally:
                progress.remove_task(task)

        for item in verify_run(folder, sums=sums):
            items.append(item)
            print(_line(item), flush=True)
            for problem in item.problems:
                print(f"  {problem}", flush=True)
    damaged = [item for item in items if item.problems]
    unverified = sum(item.note.startswith("not verified") for item in items)
    print(
        f"{folder}: {len(items) - len(damaged) - unverified} items intact, {len(damaged)} damaged"
        + (f", {unverified} not verified" if unverified else "")
    )
    rows = [asdict(item) | {"intact": not item.problems} for item in items]
    write_json(arguments.json, {"run": str(folder), "intact": not damaged, "items": rows})
    return 1 if damaged else 0


def _line(item: RunItem) -> str:
    if item.problems:
        return f"damaged  {item.name}"
    if item.note.startswith("not verified"):
        return f"-        {item.name}: {item.note}"
    return f"ok       {item.name}" + (f" ({item.note})" if item.note else "")

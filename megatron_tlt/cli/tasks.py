"""``tlt tasks [NAME]``: the kinds and names of tasks, or one problem of a task."""

from __future__ import annotations

import argparse
from typing import Literal

from rich.columns import Columns
from rich.console import Console

from megatron_tlt.config.task import TaskConfig
from megatron_tlt.rewards.verifiers import VERIFIERS
from megatron_tlt.tasks import GENERATORS, build_sources
from megatron_tlt.tasks.procedural import FAMILIES

_KINDS = (
    ("file", "problems of a .jsonl or .parquet file in verl's or GSM8K's layout: {path: FILE, verifier: math}"),
    ("python", "problems that a function or class of yours draws: {name: package.module.function}"),
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("tasks", help="list tasks and verifiers, or show a problem of one task")
    parser.add_argument("name", metavar="NAME", nargs="?", help="a generator, a family or a dataset of reasoning-gym")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.name is not None:
        return _show(arguments.name)
    console = Console(highlight=False)
    console.print(f"kind: generated, small problems with worked solutions: {', '.join(sorted(GENERATORS))}")
    console.print(
        f"kind: procedural, families with axes of difficulty and exact verifiers: {', '.join(sorted(FAMILIES))}"
    )
    for kind, text in _KINDS:
        console.print(f"kind: {kind}, {text}")
    try:
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError:
        console.print("kind: reasoning_gym, the datasets of reasoning-gym, which is not installed here")
    else:
        console.print(f"kind: reasoning_gym, {len(DATASETS)} datasets; needs answer_format: answer_tag")
        console.print(Columns(sorted(DATASETS), padding=(0, 2), column_first=True))
    console.print(f"verifiers: {', '.join(VERIFIERS)}, or a function's import path")
    return 0


def _show(name: str) -> int:
    kind: Literal["generated", "procedural", "reasoning_gym"] = (
        "generated" if name in GENERATORS else "procedural" if name in FAMILIES else "reasoning_gym"
    )
    task = TaskConfig(kind=kind, name=name, answer_format="answer_tag" if kind == "reasoning_gym" else None)
    problem = build_sources([task], "train", 0).sources[0].problem(0)
    print(f"kind: {kind}\nprompt:\n{problem.prompt.rstrip()}\n\nanswer: {problem.answer}")
    if problem.solution is not None:
        print(f"worked solution:\n{problem.solution.rstrip()}")
    return 0

"""Sphinx settings of the documentation: ``python -m sphinx -W docs runs/docs``.

The references of keys, metrics and commands are written from the package into ``_reference/`` as the site is built.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from megatron_tlt import __version__  # noqa: E402
from megatron_tlt.cli import build_parser  # noqa: E402
from megatron_tlt.config.docs import keys  # noqa: E402
from megatron_tlt.observe.metric_table import METRICS  # noqa: E402

project = "megatron-tlt"
release = __version__
extensions = ["myst_parser"]
html_theme = "furo"
html_title = "megatron-tlt"
myst_heading_anchors = 4
myst_enable_extensions = ["linkify"]
myst_linkify_fuzzy_links = False
exclude_patterns = ["images"]
html_static_path: list[str] = []
REPOSITORY_FILES = {
    "README.md": "README.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "tests/README.md": "tests.md",
}


def _table(head: str, rows: Iterator[tuple[str, ...]]) -> str:
    columns = head.split(" | ")
    lines = [columns, ["---"] * len(columns), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _keys() -> str:
    text = (
        "# Config keys\n\nEvery key of a launch config. `tlt config --docs KEY` shows the same.\nKeys below "
        "`actor.megatron`, `actor.ddp`, `actor.optimizer` and `rollout.vllm` are those of the libraries' own classes.\n"
    )
    for name, found in groupby(keys(), key=lambda key: key.key.partition(".")[0]):
        rows = ((f"`{key.key}`", key.meaning, key.kind, f"`{key.default}`") for key in found)
        text += f"\n## {name}\n{_table('key | meaning | type and bounds | default', rows)}"
    return text


def _metrics() -> str:
    text = (
        "# Metrics\n\nThe metrics of `metrics.jsonl`. `<...>` stands for any text. `observe.aliases` writes them under "
        "the names of verl,\nslime or TRL too.\n"
    )
    for name, found in groupby(METRICS.items(), key=lambda item: item[0].partition("/")[0]):
        rows = (
            (
                f"`{key}`",
                metric.unit,
                metric.meaning,
                *(f"`{x}`" if x else "" for x in (metric.verl, metric.slime, metric.trl)),
            )
            for key, metric in found
        )
        text += f"\n## {name}\n{_table('metric | unit | meaning | verl | slime | TRL', rows)}"
    return text


def _commands() -> str:
    text = "# Commands\n"
    for action in build_parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, parser in action.choices.items():
                text += f"\n## tlt {name}\n```text\n{parser.format_help()}```\n"
    return text


def _write_reference() -> None:
    folder = HERE / "_reference"
    folder.mkdir(exist_ok=True)
    for name, text in (("keys", _keys()), ("metrics", _metrics()), ("commands", _commands())):
        (folder / f"{name}.md").write_text(text, encoding="utf-8")
    for name, page in REPOSITORY_FILES.items():
        text = (HERE.parent / name).read_text(encoding="utf-8").replace("](docs/", "](../")
        for other, target in REPOSITORY_FILES.items():
            text = text.replace(f"]({other})", f"]({target})")
        (folder / page).write_text(text, encoding="utf-8")


_write_reference()

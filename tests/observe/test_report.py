"""The report of a whole run, of a poor one, and of none."""

from __future__ import annotations

import re
import shutil
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megatron_tlt.errors import RunError
from megatron_tlt.observe.report import duration, make_cards, make_tiles, write_report
from megatron_tlt.observe.report_data import last_step_timeline, load_run
from megatron_tlt.observe.report_style import CSS_NAMES
from megatron_tlt.observe.timeline import read_trace
from tests.helpers.traces import trace_problems

from .synthetic import make_run


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "quick", steps=12)


@pytest.fixture(scope="module")
def page(run_folder: Path) -> str:
    path = write_report(run_folder)
    assert path == run_folder / "report.html"
    return path.read_text(encoding="utf-8")


class Balance(HTMLParser):
    """Collects what is not closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.tags: list[str] = []
        self.wrong: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "br"):
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.stack or self.stack.pop() != tag:
            self.wrong.append(tag)


def test_page_is_self_contained_and_well_formed(page: str) -> None:
    parser = Balance()
    parser.feed(page)
    assert parser.wrong == [] and parser.stack == []
    assert not {"script", "link", "img", "iframe", "object"} & set(parser.tags)
    assert not re.search(r"(src|href)\s*=\s*[\"'](?!#)", page)
    assert "@import" not in page and not re.search(r"url\((?!#)", page)
    assert len(page) < 2_000_000


def test_page_has_every_plot_with_its_own_ids(page: str) -> None:
    plots = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    assert len(plots) == 13
    every: list[str] = []
    for svg in plots:
        ElementTree.fromstring(svg)
        ids = set(re.findall(r'\bid="([^"]*)"', svg))
        used = set(re.findall(r'(?:href="#|url\(#)([^")]*)', svg))
        assert used <= ids
        every += ids
    assert len(every) == len(set(every)), "ids of two plots collide: one would be drawn with the other's clip path"


def test_colours_follow_the_theme(page: str) -> None:
    svgs = " ".join(re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL))
    assert not [color for color in CSS_NAMES if color in svgs]
    used = set(re.findall(r"var\((--[\w-]+)\)", svgs))
    light, dark = page.split("@media (prefers-color-scheme: dark)")[:2]
    for name in used:
        assert f"{name}:" in light
        assert name == "--font" or f"{name}:" in dark.split("</style>")[0]


def test_headlines(run_folder: Path, page: str) -> None:
    run = load_run(run_folder)
    tiles = {tile.label: tile for tile in make_tiles(run)}
    start, end = (run.summary["eval"][when]["pass_at_1"] for when in ("start", "end"))
    assert tiles["Held-out pass@1"].value == f"{start:.3f} → {end:.3f}"
    assert tiles["Acceptance length"].value == "1.81"
    assert tiles["Tensors verified in engines"].value == "51 / 51"
    assert all(tile.value in page for tile in tiles.values()) and len(tiles) == 9
    assert "quickstart-cpu" in page and "chain_sum" in page and "prompts_per_step" in page
    assert 'class="notes"' not in page


def test_synthetic_timeline_is_sound_and_its_last_step_is_drawn(run_folder: Path) -> None:
    trace = read_trace(run_folder / "timeline.json")
    assert trace_problems(trace) == []
    timeline = last_step_timeline(trace)
    assert timeline is not None and timeline.step == 12
    assert timeline.rows == ["rank 0", "rank 0 · verifiers", "rank 1"]
    assert min(bar.start for bar in timeline.bars) == 0
    assert {"rollout", "idle", "evaluate"} <= {bar.category for bar in timeline.bars}
    assert [len(points) for _, points in sorted(timeline.counters["running"].items())] == [65, 65]


PIECES = ("metrics.jsonl", "timeline.json", "summary.json", "config.resolved.yaml", "lengths.jsonl")


@pytest.mark.parametrize("file", PIECES)
@pytest.mark.parametrize("damage", [None, "{ not: [sound\nnor whole\n\n", "[1, 2]\n[3]\n"])
def test_missing_or_damaged_piece_is_noted(run_folder: Path, tmp_path: Path, file: str, damage: str | None) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run_folder, folder)
    (folder / file).unlink()
    if damage is not None:
        (folder / file).write_text(damage)
    run = load_run(folder)
    assert len(run.notes) == 1 and file in run.notes[0] and str(folder) not in run.notes[0]
    assert ("is missing" if damage is None else "cannot be read") in run.notes[0]


def test_what_remains_is_drawn(run_folder: Path, tmp_path: Path) -> None:
    """Without metrics and configuration: lengths, their histogram, acceptance and the timeline."""
    folder = tmp_path / "run"
    shutil.copytree(run_folder, folder)
    (folder / "config.resolved.yaml").unlink()
    (folder / "metrics.jsonl").write_text("rubbish\nand more\n")
    page = write_report(folder).read_text(encoding="utf-8")
    assert page.count("<svg") == 5 and "metrics.jsonl cannot be read" in page
    assert "Not measured in this run: reward and held-out accuracy, time per step" in page
    assert "Held-out pass@1" in page  # the summary still has it


def test_empty_folder_and_none(tmp_path: Path) -> None:
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert "<svg" not in page and page.count("is missing") == 5
    with pytest.raises(RunError, match="no such folder"):
        write_report(tmp_path / "nothing")


def test_text_from_the_run_is_escaped(tmp_path: Path) -> None:
    (tmp_path / "config.resolved.yaml").write_text("run: {name: '<script>alert(1)</script>'}\n")
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert "<script>" not in page and "&lt;script&gt;" in page


def test_one_step_and_speculation_off(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "reward/mean": 0.5, "time/rollout": 1.0, "mismatch/k3_kl": 0.0}\n'
    )
    (tmp_path / "summary.json").write_text(
        '{"speculation": {"enabled": false}, "eval": {"start": {"pass_at_1": null}}}'
    )
    run = load_run(tmp_path)
    assert [card.title for card in make_cards(run) if card.svg is not None] == [
        "Reward and held-out accuracy",
        "Time per step",
    ]
    assert ("Acceptance length", "off") in [(tile.label, tile.value) for tile in make_tiles(run)]


def test_duration() -> None:
    assert [duration(s) for s in (1.23, 89, 125, 7265)] == ["1.2 s", "89.0 s", "2 min 05 s", "2 h 01 min"]

"""The report's section of responses: which are shown, as what, and what damage does to it."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_tlt.observe.report import write_report
from megatron_tlt.observe.report_data import load_run
from megatron_tlt.observe.report_plots import MAX_TASKS, plot_tasks, tasks_of
from megatron_tlt.observe.report_samples import MAX_SAMPLES, shown_rollouts

from .synthetic import make_run


def row(step: float, task: str = "gcd", origin: str = "train", **more: Any) -> dict[str, Any]:
    values = {"chosen": ["best"], "reward": 1.0, "correct": True, "length": 1234, "finish_reason": "stop"}
    return {"step": step, "task": task, "origin": origin, **values, "prompt": "p", "response": "r", **more}


def titles(rows: list[dict[str, Any]]) -> dict[str, list[tuple[str, bool, int]]]:
    shown = shown_rollouts(rows)
    return {task: [(r.title, r.newest, len(r.samples)) for r in rollouts] for task, rollouts in shown.items()}


def test_the_newest_and_a_few_earlier_steps_of_every_task_and_kind() -> None:
    rows = [row(step) for step in range(1, 32)] + [row(step, origin="evaluation") for step in (0, 30)]
    rows += [row(31), row(2, "sums", "greedy_evaluation")]
    assert titles(rows) == {
        "gcd": [
            ("Step 31, training", True, 2),
            ("Step 30, held-out evaluation", True, 1),
            ("Step 21, training", False, 1),
            ("Step 11, training", False, 1),
            ("Step 1, training", False, 1),
            ("Step 0, held-out evaluation", False, 1),
        ],
        "sums": [("Step 2, held-out evaluation, greedy", True, 1)],
    }


def test_where_there_are_too_many_the_newest_of_each_task_remain() -> None:
    tasks = [f"task{i:02}" for i in range(40)]
    found = titles([row(step, task) for step in (1, 2, 3) for task in tasks for _ in range(2)])
    assert list(found) == tasks and sum(n for shown in found.values() for _, _, n in shown) == MAX_SAMPLES
    assert all(shown[0] == ("Step 3, training", True, 2) for shown in found.values())
    assert sum(len(shown) == 2 for shown in found.values()) == (MAX_SAMPLES - 80) // 2


def test_a_response_is_shown_with_what_was_judged() -> None:
    more = {"extracted": "4", "answer": "5", "finish_reason": "length", "correct": False, "problem": "gcd/1"}
    (rollout,) = shown_rollouts([row(1, acceptance_length=1.257, chosen=["worst", "longest"], **more)])["gcd"]
    (sample,) = rollout.samples
    assert sample.facts.split(" · ") == [
        "worst, longest",
        "reward 1",
        "not correct",
        "1,234 tokens",
        "truncated at the length limit",
        "acceptance length 1.26",
        "gcd/1",
    ]
    assert sample.texts == {"Prompt": "p", "Response": "r", "Extracted answer": "4", "Reference answer": "5"}


@pytest.mark.parametrize("bad", [{}, {"step": "x"}, {"step": 1}, {"step": 1, "chosen": {"a": [1]}, "reward": "much"}])
def test_a_row_that_lacks_keys_or_has_others_is_no_error(bad: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").write_text(json.dumps(bad) + "\n" + json.dumps(row(2, response=["a", 1])) + "\n")
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert "Step 2, training" in page and "samples.jsonl cannot be read" not in page


def test_texts_are_escaped_shortened_and_free_of_control_characters(tmp_path: Path) -> None:
    attack = "</pre></details><script>alert(1)</script>\x00\x1b[31m{{ 7 * 7 }}"
    rows = [row(1, task="<b>", prompt="\n" + "x" * 9000, response=attack, problem='"<i>')]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert "<script>" not in page and "<b>" not in page and "<i>" not in page
    assert html.escape("</pre></details><script>") + "alert(1)" in page and "\u2400\u241b[31m{{ 7 * 7 }}" in page
    assert "<pre>\n\nxxx" in page, "a browser drops the first line break of a pre"
    assert "[... 5,001 characters left out ...]" in page and "x" * 4000 not in page


def test_section_of_a_whole_run_and_of_one_that_wrote_none(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=12)
    page = write_report(run).read_text(encoding="utf-8")
    assert html.escape("<train chain_sum 12 best>\n#### 4</s>") in page
    assert html.escape("<evaluation basic_arithmetic 6 worst>") in page and "<train chain_sum 11 best>" not in page
    # 2 tasks: 4 steps and 2 evaluations, 2 responses each
    assert page.count('<details class="sample') == 24 and "24 of 56 in samples.jsonl" in page
    assert page.count('<details class="sample correct" open>') == 4, "the first of the newest of each kind and task"

    (run / "samples.jsonl").unlink()
    page = write_report(run).read_text(encoding="utf-8")
    assert "Samples" not in page and 'class="notes"' not in page


@pytest.mark.parametrize("damage", ["{ not: [sound\nnor whole\n\n", "[1, 2]\n[3]\n"])
def test_a_damaged_file_is_noted(damage: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=2)
    (run / "samples.jsonl").write_text(damage)
    (note,) = load_run(run).notes
    assert note.startswith("samples.jsonl cannot be read")
    assert 'aria-label="Samples"' not in write_report(run).read_text(encoding="utf-8")


def test_tasks_with_most_responses_are_drawn(tmp_path: Path) -> None:
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in (1, 2):
            values = {f"task/a_{i}/b$/responses": i + 1 for i in range(9)} | {"task/a_8/b$/reward": 0.5}
            file.write(json.dumps({"step": step, **values}) + "\n")
    run = load_run(tmp_path)
    assert tasks_of(run)[:2] == ["a_8/b$", "a_7/b$"] and len(tasks_of(run)) > MAX_TASKS
    assert "a_8/b$" in (plot_tasks(run) or "")
    assert plot_tasks(load_run(make_run(tmp_path / "run", steps=2))) is not None
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 1.0}\n')
    assert plot_tasks(load_run(tmp_path)) is None

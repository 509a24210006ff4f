"""The report's section of response texts, by task: the newest step and evaluation, and a few earlier ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from megatron_tlt.observe.report_data import is_number
from megatron_tlt.observe.samples import EVALUATION, GREEDY_EVALUATION, SAMPLES_FILE, TRAIN, shorten

MAX_SAMPLES = 120
"""Limit for the page; the file has all."""

_MAX_CHARACTERS = 4000
_STEPS = 4
_TITLES = {TRAIN: "training", EVALUATION: "held-out evaluation", GREEDY_EVALUATION: "held-out evaluation, greedy"}
# Browsers drop or misplace control characters; Unicode has a visible symbol for each.
_PICTURES = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\t\n"} | {0x7F: "\u2421"}


@dataclass(frozen=True)
class ShownSample:
    """One response: ``facts`` in a line, ``texts`` by title (prompt, response, answers), all as plain text."""

    facts: str
    correct: bool
    texts: dict[str, str]


@dataclass(frozen=True)
class ShownRollout:
    """The samples of one task from a training rollout or an evaluation; ``newest`` within its kind and task."""

    title: str
    newest: bool
    samples: list[ShownSample]


def shown_rollouts(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[ShownRollout]]:
    """Groups the rows of ``samples.jsonl``: task -> rollouts, the newest step first, at most MAX_SAMPLES responses.

    For each task and kind: the newest, the first, and some between. If there is no room, the oldest are dropped.
    """
    found: dict[tuple[str, str], dict[float, list[Mapping[str, Any]]]] = {}
    for row in rows:
        if is_number(row.get("step")):
            by_step = found.setdefault((_text(row.get("task")), _text(row.get("origin"))), {})
            by_step.setdefault(row["step"], []).append(row)
    # (number of newer steps of this kind, task, origin, step): the newest are taken first
    order = sorted(
        (age, *key, step) for key, by_step in found.items() for age, step in enumerate(_spread(sorted(by_step)))
    )
    rollouts: dict[str, list[tuple[float, str, ShownRollout]]] = {}
    room = MAX_SAMPLES
    for age, task, origin, step in order:
        samples = [_sample(row) for row in found[task, origin][step][:room]]
        room -= len(samples)
        if samples:
            title = f"Step {step:g}, {_TITLES.get(origin, origin)}"
            rollouts.setdefault(task, []).append((-step, origin, ShownRollout(title, age == 0, samples)))
    return {task: [each for _, _, each in sorted(rollouts[task], key=lambda t: t[:2])] for task in sorted(rollouts)}


def render_samples(rows: Sequence[Mapping[str, Any]], environment: jinja2.Environment) -> Markup | None:
    """The section with every text of the run escaped; None without rows. ``environment`` must autoescape."""
    tasks = shown_rollouts(rows)
    if not tasks:
        return None
    template = resources.files("megatron_tlt.observe").joinpath("report_samples.html.j2").read_text(encoding="utf-8")
    shown = sum(len(rollout.samples) for rollouts in tasks.values() for rollout in rollouts)
    return Markup(
        environment.from_string(template).render(tasks=tasks, shown=shown, written=len(rows), file=SAMPLES_FILE)
    )


def _spread(steps: Sequence[float]) -> list[float]:
    """At most _STEPS of the ascending ``steps``, newest first: the last, the first, and evenly spaced ones between."""
    if len(steps) <= _STEPS:
        return list(reversed(steps))
    return [steps[(len(steps) - 1) * n // (_STEPS - 1)] for n in reversed(range(_STEPS))]


def _sample(row: Mapping[str, Any]) -> ShownSample:
    chosen = row.get("chosen")
    facts = [
        ", ".join(map(_text, chosen)) if isinstance(chosen, list) else _text(chosen),
        _number("reward {:.3g}", row.get("reward")),
        "correct" if row.get("correct") is True else "not correct",
        _number("{:,} tokens", row.get("length")),
        "truncated at the length limit" if row.get("finish_reason") == "length" else "",
        _number("acceptance length {:.2f}", row.get("acceptance_length")),
        _text(row.get("problem")),
    ]
    titles = {
        "prompt": "Prompt",
        "response": "Response",
        "extracted": "Extracted answer",
        "answer": "Reference answer",
        "error": "Verifier error",
    }
    texts = {title: _text(row[key]) for key, title in titles.items() if row.get(key) is not None}
    return ShownSample(" · ".join(fact for fact in facts if fact), row.get("correct") is True, texts)


def _text(value: Any) -> str:
    return "" if value is None else shorten(str(value), _MAX_CHARACTERS)[0].translate(_PICTURES)


def _number(form: str, value: Any) -> str:
    return form.format(value) if is_number(value) else ""

"""``samples.jsonl``: texts of some responses of every step and evaluation, chosen by task, for reading."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_tlt.observe.jsonl import JsonLinesFile, read_jsonl

SAMPLES_FILE = "samples.jsonl"

# values of a row's ``origin``
TRAIN = "train"
EVALUATION = "evaluation"
GREEDY_EVALUATION = "greedy_evaluation"

SampleRow = dict[str, Any]
"""A line of the file; ``step`` is added on writing. ``trainer/samples.py`` lists its keys."""

_ROLES = ("best", "worst", "longest")


def choose_samples(rewards: Sequence[float], lengths: Sequence[int], count: int) -> dict[int, list[str]]:
    """At most ``count`` responses by index, each with the reasons for choosing it.

    In this order: ``best`` (highest reward), ``worst`` (lowest reward), ``longest``; one response may have several
    reasons. A ``count`` above three adds ``other`` responses, evenly spaced over the rest. Among equal rewards the
    first is best and the last is worst, so that equal rewards also give two responses. Among equal lengths the first is
    longest.
    """
    indices = range(len(rewards))
    if not rewards or count <= 0:
        return {}
    found = (
        min(indices, key=lambda i: (-rewards[i], i)),
        min(indices, key=lambda i: (rewards[i], -i)),
        min(indices, key=lambda i: (-lengths[i], i)),
    )
    chosen: dict[int, list[str]] = {}
    for role, index in list(zip(_ROLES, found, strict=True))[:count]:
        chosen.setdefault(index, []).append(role)
    rest = [i for i in indices if i not in chosen]
    others = min(max(count - len(_ROLES), 0), len(rest))
    return chosen | {rest[len(rest) * n // others]: ["other"] for n in range(others)}


def shorten(text: str, max_characters: int) -> tuple[str, int]:
    """``text`` without its middle if it is too long, and the number of characters left out, which the gap states.

    Both ends are kept: a response ends with its answer. Lone surrogates, which UTF-8 cannot encode, become question
    marks.
    """
    text = text.encode("utf-8", "replace").decode("utf-8")
    left_out = len(text) - max_characters
    if left_out <= 0:
        return text, 0
    head = max_characters // 2
    return f"{text[:head]}\n[... {left_out:,} characters left out ...]\n{text[head + left_out :]}", left_out


class SampleLog:
    """A run's ``samples.jsonl``; used on rank 0 only. Drops rows after ``kept_step``, which a resumed run repeats."""

    def __init__(self, folder: Path, kept_step: int) -> None:
        self._file = JsonLinesFile(folder / SAMPLES_FILE)
        self.truncate_after(kept_step)

    def truncate_after(self, kept_step: int) -> None:
        """Drops the rows after ``kept_step``, which the run repeats."""
        self._file.truncate_after(kept_step)
        self._kept_step = kept_step

    def add(self, step: int, rows: Iterable[SampleRow]) -> None:
        """Adds the rows of a training step; raises RunError if the disk is full; no partial row remains."""
        self._file.append(_numbered(step, rows))

    def add_evaluation(self, step: int, rows: Iterable[SampleRow]) -> None:
        """Writes the rows of the evaluation after ``step``; replaces those of an earlier evaluation after that step.

        A step's checkpoint is older than its evaluation, so a resumed run evaluates again. Raises RunError if the disk
        is full; the file is unchanged.
        """
        new = _numbered(step, rows)
        if step > self._kept_step:
            self._file.append(new)
            return
        kept = [row for row in read_jsonl(self._file.path) if row.get("step") != step or row.get("origin") == TRAIN]
        self._file.replace(kept + new)

    def close(self) -> None:
        """Closes the file; further rows fail."""
        self._file.close()


def _numbered(step: int, rows: Iterable[Mapping[str, Any]]) -> list[SampleRow]:
    return [{"step": step, **row} for row in rows]

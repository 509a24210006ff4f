"""Sources of problems: a generator without end, or the rows of a file, reshuffled every epoch."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Literal, Protocol

from megatron_tlt.errors import ConfigError
from megatron_tlt.tasks.files import FileParams, Row, read_rows
from megatron_tlt.tasks.generator import Generator
from megatron_tlt.tasks.seeding import is_held_out, stable_int
from megatron_tlt.tasks.types import Problem

Split = Literal["train", "held_out"]

_MAX_ATTEMPTS = 2000


class Source(Protocol):
    """Problems by index; a pure function of the index."""

    label: str

    def problem(self, index: int) -> Problem: ...


class GeneratedSource:
    """Problem ``index`` is the first draw of its own that belongs to the split."""

    def __init__(self, label: str, generator: Generator, split: Split, held_out_fraction: float, seed: int) -> None:
        self.label = label
        self._generator = generator
        self._split = split
        self._fraction = held_out_fraction
        self._seed = seed

    def problem(self, index: int) -> Problem:
        """Raises ConfigError when the task has so few different prompts that none falls into the split."""
        wanted = self._split == "held_out"
        for attempt in range(_MAX_ATTEMPTS):
            draft = self._generator.draw(stable_int(self._seed, self.label, self._split, index, attempt))
            if is_held_out(draft.worked.prompt, self._fraction) == wanted:
                return Problem(
                    uid=f"{self.label}/{self._split}/{self._seed}/{index}",
                    source=self.label,
                    prompt=draft.worked.prompt,
                    answer=draft.worked.answer,
                    verifier="reasoning_gym",
                    metadata=draft.metadata,
                    solution=draft.worked.solution,
                )
        raise ConfigError(
            f"task {self.label}: none of {_MAX_ATTEMPTS} draws is a {self._split} problem at held_out_fraction "
            f"{self._fraction}; widen params.sizes or change held_out_fraction"
        )


class FileSource:
    """The rows of one split; every epoch has an order of its own."""

    def __init__(self, label: str, verifier: str, split: Split, rows: list[Row], seed: int) -> None:
        self.label = label
        self._verifier = verifier
        self._split = split
        self._rows = rows
        self._seed = seed
        self._epoch: int | None = None
        self._order: list[int] = []

    def __len__(self) -> int:
        return len(self._rows)

    def problem(self, index: int) -> Problem:
        """Row of the file; the same row has the same uid in every epoch."""
        epoch, position = divmod(index, len(self._rows))
        if epoch != self._epoch:
            self._order = list(range(len(self._rows)))
            random.Random(stable_int(self._seed, self.label, "epoch", epoch)).shuffle(self._order)
            self._epoch = epoch
        row = self._rows[self._order[position]]
        return Problem(
            uid=f"{self.label}/{self._split}/{row.number}",
            source=row.data_source or self.label,
            prompt=row.prompt,
            answer=row.answer,
            verifier=self._verifier,
            metadata={} if row.messages is None else {"messages": row.messages},
            solution=row.solution,
        )


def split_rows(path: Path, held_out_path: Path | None, fraction: float, split: Split, params: FileParams) -> list[Row]:
    """The rows of one split.

    With ``held_out_path`` the second file is the held-out set, and training leaves out every prompt that it holds;
    without it the prompt's text decides. Raises ConfigError for bad files and for a split without rows.
    """
    rows = read_rows(path, params)
    if held_out_path is None:
        kept = [row for row in rows if is_held_out(row.prompt, fraction) == (split == "held_out")]
        if not kept:
            raise ConfigError(
                f"{path}: no {split} problem among {len(rows)} rows at held_out_fraction {fraction}; "
                "change held_out_fraction or give held_out_path"
            )
        return kept
    held_out = read_rows(held_out_path, params)
    if split == "held_out":
        return held_out
    prompts = {row.prompt for row in held_out}
    kept = [row for row in rows if row.prompt not in prompts]
    if not kept:
        raise ConfigError(f"{path}: all {len(rows)} prompts are also in {held_out_path}; the two sets must differ")
    return kept

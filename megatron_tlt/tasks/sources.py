"""Sources of problems: an infinite generator, or the rows of a file, reshuffled every epoch."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Literal, Protocol

from megatron_tlt.errors import ConfigError
from megatron_tlt.tasks.files import FileParams, Row, read_rows
from megatron_tlt.tasks.generator import DrawnProblem, Generator
from megatron_tlt.tasks.library_dataset import LibraryDataset
from megatron_tlt.tasks.limit import PromptLimit
from megatron_tlt.tasks.procedural import ProblemFamily
from megatron_tlt.tasks.python_task import PythonTask
from megatron_tlt.tasks.seeding import is_held_out, stable_int
from megatron_tlt.tasks.types import Problem
from megatron_tlt.tasks.wording import Wording

Split = Literal["train", "held_out"]
HeldOut = Literal["prompt", "structure"]

_MAX_ATTEMPTS = 2000
_ATTEMPTS_PER_CELL = 50  # all structures of a small cell may belong to the other split
_PROBED = 32  # number of draws
_AS_IT_IS = Wording()

logger = logging.getLogger(__name__)


class Source(Protocol):
    """Problems by index; ``problem`` is a pure function of the index."""

    label: str

    def problem(self, index: int) -> Problem: ...


class GeneratedSource:
    """Generated problems. Problem ``index`` is the first of its draws that belongs to the split and is not too long.

    The cells of a procedural family follow each other by index, so that any range of indices has all of them alike. The
    indices of a cell without a structure of the split are spread over the others. ``held_out`` says what decides the
    split, as in the task's section. ``left_out`` counts draws that were too long.
    """

    def __init__(
        self,
        label: str,
        verifier: str,
        generator: Generator | LibraryDataset | PythonTask | ProblemFamily,
        split: Split,
        held_out_fraction: float,
        seed: int,
        limit: PromptLimit | None = None,
        wording: Wording = _AS_IT_IS,
        held_out: HeldOut = "prompt",
    ) -> None:
        self.label = label
        self.left_out = 0
        self._held_out = held_out
        self._verifier = verifier
        self._wording = wording
        self._generator = generator
        self._split = split
        self._fraction = held_out_fraction
        self._seed = seed
        self._limit = limit if limit is not None and limit.leave_out else None

    def problem(self, index: int) -> Problem:
        """The problem of an index.

        Raises:
            ConfigError: no draw falls into the split, as the task has too few different prompts, or all are too long.
        """
        wanted = self._split == "held_out"
        for attempt in range(_MAX_ATTEMPTS):
            draft = self._draw(index, attempt)
            if is_held_out(draft.split_by(self._held_out), self._fraction) != wanted:
                continue
            problem = self._problem(draft, str(index))
            if self._limit is None or self._limit.fits(problem):
                return problem
            self._count(problem)
        raise ConfigError(
            f"task {self.label}: none of {_MAX_ATTEMPTS} draws is a {self._split} problem at held_out_fraction "
            f"{self._fraction}{' within rollout.max_prompt_tokens' if self._limit else ''}; widen params or "
            "change held_out_fraction"
        )

    def probe(self) -> list[Problem]:
        """Some problems of either split, with about the longest prompts of the task."""
        return [self._problem(draft, "-") for draft in self._generator.probe(_PROBED)]

    @property
    def probed(self) -> str:
        """Description of the draws of :meth:`probe` for error messages."""
        return self._generator.probed

    def _draw(self, index: int, attempt: int) -> DrawnProblem:
        key = stable_int(self._seed, self.label, self._split, index, attempt)
        if isinstance(self._generator, ProblemFamily):
            return self._generator.draw(key, self._cell(index, attempt // _ATTEMPTS_PER_CELL))
        return self._generator.draw(key)

    def _cell(self, index: int, passed: int) -> int:
        """The cell of an index, of which ``passed`` cells have had no problem."""
        assert isinstance(self._generator, ProblemFamily)
        if passed == 0 or self._held_out != "structure":
            return index + passed
        others = range(1, len(self._generator.cells))
        # The next cell would have the share of every cell before it that has no structure of the split.
        order = random.Random(stable_int(self._seed, self.label, "cells", index)).sample(others, len(others))
        return index + [0, *order][passed % (len(order) + 1)]

    def _problem(self, draft: DrawnProblem, index: str) -> Problem:
        problem = Problem(
            uid=f"{self.label}/{self._split}/{self._seed}/{index}",
            source=self.label,
            prompt=draft.worked.prompt,
            answer=draft.worked.answer,
            verifier=self._verifier,
            metadata=draft.metadata,
            solution=draft.worked.solution,
            recurs=self._split == "held_out",  # evaluations repeat the same problems
        )
        return self._wording.apply(problem)

    def _count(self, problem: Problem) -> None:
        self.left_out += 1
        if self.left_out & (self.left_out - 1) == 0:  # 1, 2, 4, ...: a run may leave out thousands
            logger.warning("task %s: %d prompts left out so far because they are too long", self.label, self.left_out)


class FileSource:
    """The rows of one split that ``limit`` accepts, or ``budget`` of them, shuffled anew in every epoch.

    Raises:
        ConfigError: as ``PromptLimit.fitting``, naming ``path``; or ``budget`` is larger than the number of rows,
            naming ``key``, that of the task.
    """

    def __init__(
        self,
        label: str,
        verifier: str,
        split: Split,
        rows: list[Row],
        seed: int,
        path: Path | None = None,
        limit: PromptLimit | None = None,
        wording: Wording = _AS_IT_IS,
        budget: int | None = None,
        key: str = "tasks[0]",
    ) -> None:
        self.label = label
        self._wording = wording
        self._verifier = verifier
        self._split = split
        self._rows = rows
        self._seed = seed
        self._epoch: int | None = None
        self._order: list[int] = []
        if limit is not None:
            problems = [self._problem(row) for row in rows]
            self._rows = [rows[i] for i in limit.fitting(problems, [row.number for row in rows], str(path))]
        if budget is not None:
            if budget > len(self._rows):
                what = f"{path} has {len(self._rows)} rows {'to train on' if split == 'train' else 'to test on'}"
                raise ConfigError(f"{key}.budget: found {budget}; {what}; allowed: at most that many")
            self._rows = random.Random(stable_int(seed, label, "budget")).sample(self._rows, budget)

    def __len__(self) -> int:
        return len(self._rows)

    def problem(self, index: int) -> Problem:
        """The row at this index; a row has the same uid in every epoch."""
        epoch, position = divmod(index, len(self._rows))
        if epoch != self._epoch:
            self._order = list(range(len(self._rows)))
            random.Random(stable_int(self._seed, self.label, "epoch", epoch)).shuffle(self._order)
            self._epoch = epoch
        return self._problem(self._rows[self._order[position]])

    def _problem(self, row: Row) -> Problem:
        problem = Problem(
            uid=f"{self.label}/{self._split}/{row.number}",
            source=row.data_source or self.label,
            prompt=row.prompt,
            answer=row.answer,
            verifier=self._verifier,
            metadata={} if row.messages is None else {"messages": row.messages},
            solution=row.solution,
        )
        return self._wording.apply(problem)


def split_rows(path: Path, held_out_path: Path | None, fraction: float, split: Split, params: FileParams) -> list[Row]:
    """The rows of one split.

    With ``held_out_path`` the second file is the held-out set, and the train split omits every prompt that it contains.
    Without it the prompt's text decides. ``prompt_suffix`` plays no part in either.

    Raises:
        ConfigError: a file is bad, or the split has no rows.
    """
    rows = read_rows(path, params)
    if held_out_path is None:
        kept = [row for row in rows if is_held_out(row.split_text, fraction) == (split == "held_out")]
        if not kept:
            raise ConfigError(
                f"{path}: no {split} problem among {len(rows)} rows at held_out_fraction {fraction}; "
                "change held_out_fraction or give held_out_path"
            )
        return kept
    held_out = read_rows(held_out_path, params)
    if split == "held_out":
        return held_out
    prompts = {row.split_text for row in held_out}
    kept = [row for row in rows if row.split_text not in prompts]
    if not kept:
        raise ConfigError(f"{path}: all {len(rows)} prompts are also in {held_out_path}; the two sets must differ")
    return kept

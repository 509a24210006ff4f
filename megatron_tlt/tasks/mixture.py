"""Combines the launch config's tasks into one weighted, infinite, randomly accessible sequence of problems."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from megatron_tlt.config.task import TaskConfig
from megatron_tlt.errors import ConfigError
from megatron_tlt.tasks.chain_sum import ChainSum
from megatron_tlt.tasks.files import FileParams
from megatron_tlt.tasks.gcd import Gcd
from megatron_tlt.tasks.generator import Generator
from megatron_tlt.tasks.letter_counting import LetterCounting
from megatron_tlt.tasks.library_dataset import LibraryDataset
from megatron_tlt.tasks.limit import PromptLimit
from megatron_tlt.tasks.number_sorting import NumberSorting
from megatron_tlt.tasks.pool import PoolSource, first_different, read_tiers
from megatron_tlt.tasks.procedural import FAMILIES, ProblemFamily
from megatron_tlt.tasks.python_task import PythonTask
from megatron_tlt.tasks.seeding import stable_int
from megatron_tlt.tasks.sizes import Params
from megatron_tlt.tasks.sources import FileSource, GeneratedSource, Source, Split, split_rows
from megatron_tlt.tasks.spell_backward import SpellBackward
from megatron_tlt.tasks.split_rules import split_violations
from megatron_tlt.tasks.types import Problem
from megatron_tlt.tasks.wording import Wording

#: ``tasks[].name`` -> generator.
GENERATORS: dict[str, type[Generator]] = {
    generator.dataset: generator for generator in (ChainSum, Gcd, LetterCounting, NumberSorting, SpellBackward)
}

P = TypeVar("P", bound=Params)

_BLOCK = 1000


def shares(weights: list[float], total: int) -> list[int]:
    """Splits ``total`` in proportion to ``weights`` by largest remainder; every share is at least 1.

    ``total`` must be at least ``len(weights)``.
    """
    spare = total - len(weights)
    exact = [spare * weight / sum(weights) for weight in weights]
    counts = [int(value) for value in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: (counts[i] - exact[i], i))
    for i in by_remainder[: spare - sum(counts)]:
        counts[i] += 1
    return [count + 1 for count in counts]


class ProblemMixture:
    """A weighted mixture of sources. ``problem(index)`` is a pure function, so a counter suffices to resume.

    Every block of 1000 indices contains each source in exact proportion to its weight, shuffled per block. The problems
    of a source are used in sequence, so that each row of a file occurs once per epoch.
    """

    def __init__(
        self,
        sources: list[Source],
        weights: list[float],
        split: Split,
        seed: int,
        twin: Callable[[], ProblemMixture] | None = None,
    ) -> None:
        self.sources, self.weights = sources, weights
        self.split: Split = split
        self._seed = seed
        self._twin = twin
        self._counts = shares(weights, max(_BLOCK, len(weights)))
        self._block: int | None = None
        self._slots: list[tuple[int, int]] = []

    def problem(self, index: int) -> Problem:
        """Problem ``index`` (from 0, unbounded)."""
        source, within = self.locate(index)
        return self.sources[source].problem(within)

    def locate(self, index: int) -> tuple[int, int]:
        """The source of problem ``index``, and the problem's index in it."""
        if index < 0:
            raise IndexError(f"problem index {index} is negative")
        block, slot = divmod(index, sum(self._counts))
        if block != self._block:
            self._slots = self._block_slots(block)
            self._block = block
        source, within = self._slots[slot]
        return source, block * self._counts[source] + within

    def problems(self, start: int, count: int) -> list[Problem]:
        """Problems ``start`` to ``start + count - 1``."""
        return [self.problem(index) for index in range(start, start + count)]

    def distinct(self, n: int) -> list[Problem]:
        """The first ``n`` problems with different prompts; fewer if the sources have no more."""
        found: dict[str, Problem] = {}
        index = last_new = 0
        while len(found) < n and index - last_new < 2 * sum(self._counts):
            problem = self.problem(index)
            if problem.prompt not in found:
                found[problem.prompt] = problem
                last_new = index
            index += 1
        return list(found.values())

    def held_out(self, n: int) -> list[Problem]:
        """``n`` different held-out problems of the same tasks, whatever this mixture's split; fewer if none remain."""
        mixture = self if self.split == "held_out" or self._twin is None else self._twin()
        return mixture.distinct(n)

    def _block_slots(self, block: int) -> list[tuple[int, int]]:
        order = [source for source, count in enumerate(self._counts) for _ in range(count)]
        random.Random(stable_int(self._seed, "mixture", self.split, block)).shuffle(order)
        seen: Counter[int] = Counter()
        slots = []
        for source in order:
            slots.append((source, seen[source]))
            seen[source] += 1
        return slots


def build_sources(
    tasks: list[TaskConfig],
    split: Split,
    seed: int,
    limit: PromptLimit | None = None,
    *,
    pooled: bool | None = None,
    compare_tiers: bool = True,
) -> ProblemMixture:
    """The mixture of all tasks, for one split.

    Args:
        tasks: of the launch config.
        split: train or held-out problems.
        seed: of the order and of generated problems.
        limit: on the length of prompts; None: no check.
        pooled: keep to the budgets of the tasks; None: for problems to train on.
        compare_tiers: with the problems of their files; false if ``limit`` is unknown here and leaves prompts out.

    Raises:
        ConfigError: lists every unknown generator, wrong parameter, bad file and prompt that ``limit`` refuses, and
            tasks of one generator with different held-out fractions (a prompt would be held out in one and trained on
            in the other).
    """
    violations = split_violations(tasks)
    names = Counter(task.name for task in tasks)
    sources: list[Source] = []
    for position, task in enumerate(tasks):
        label = task.name if names[task.name] == 1 else f"{task.name}#{position}"
        try:
            in_pool = split == "train" if pooled is None else pooled
            chosen = task if in_pool else task.without_pool
            sources.append(_source(chosen, f"tasks[{position}]", label, split, seed, limit, compare_tiers))
        except ConfigError as error:
            violations += str(error).splitlines()
    if violations:
        raise ConfigError("\n".join(violations))
    twin = None if split == "held_out" else lambda: build_sources(tasks, "held_out", seed, limit)
    return ProblemMixture(sources, [task.weight for task in tasks], split, seed, twin)


def evaluation_problems(
    tasks: Sequence[TaskConfig],
    count: int | None,
    seed: int,
    limit: PromptLimit | None = None,
    *,
    compare_tiers: bool = True,
) -> list[Problem]:
    """The first ``count`` problems (None: all, of a file) of an evaluation's own tasks.

    Of a generator they are held-out problems, of its budget if it has one; of a prompt file all rows. For
    ``limit`` and ``compare_tiers`` see :func:`build_sources`.

    Raises:
        ConfigError: a task is wrong, its file is missing or has bad rows.
    """
    whole = [
        task.model_copy(update={"held_out_path": task.held_out_path or task.path}) if task.kind == "file" else task
        for task in tasks
    ]
    mixture = build_sources(whole, "held_out", seed, limit, pooled=True, compare_tiers=compare_tiers)
    if count is not None:
        return mixture.distinct(count)
    (source,) = mixture.sources
    assert isinstance(source, FileSource)
    return [source.problem(index) for index in range(len(source))]


def _source(
    task: TaskConfig, key: str, label: str, split: Split, seed: int, limit: PromptLimit | None, compare_tiers: bool
) -> Source:
    wording = Wording.of(task, key)
    if task.kind == "file":
        assert task.path is not None  # required by the schema
        for name, file in (("path", task.path), ("held_out_path", task.held_out_path)):
            if file is not None and not file.is_file():
                raise ConfigError(f"{key}.{name}: no file {file}; a file task needs a .jsonl or .parquet file")
        params = _checked(FileParams, task.params, key)
        rows = split_rows(task.path, task.held_out_path, task.held_out_fraction, split, params)
        path = task.held_out_path if split == "held_out" and task.held_out_path is not None else task.path
        return FileSource(label, task.verifier, split, rows, seed, path, limit, wording, task.budget, key)
    source = GeneratedSource(
        label,
        task.verifier,
        _generator(task, key),
        split,
        task.held_out_fraction,
        seed,
        limit,
        wording,
        task.held_out,
    )
    if task.budget is None:
        return source
    if task.tier_mix is None:
        return PoolSource(source, first_different(source, task.budget, f"{key}.budget"), seed)
    assert task.tier_file is not None  # required by the schema
    calibrated = read_tiers(task.tier_file, label, key, split)
    indices, tiers = calibrated.pool(
        source, task.tier_mix.model_dump(), task.budget, key, task.tier_file, compare=compare_tiers
    )
    return PoolSource(source, indices, seed, tiers)


def _generator(task: TaskConfig, key: str) -> Generator | LibraryDataset | PythonTask | ProblemFamily:
    if task.kind == "procedural":
        if task.name not in FAMILIES:
            raise ConfigError(f"{key}.name: unknown family '{task.name}'; allowed are {', '.join(sorted(FAMILIES))}")
        family = FAMILIES[task.name]
        return family(_checked(family.params_type, task.params, key), key)
    if task.kind == "python":
        return PythonTask(task.name, task.params, key)
    if task.kind == "reasoning_gym":
        return LibraryDataset(task.name, task.params, key)
    if task.name not in GENERATORS:
        raise ConfigError(f"{key}.name: unknown generator '{task.name}'; allowed are {', '.join(sorted(GENERATORS))}")
    kind = GENERATORS[task.name]
    return kind(_checked(kind.params_type, task.params, key))


def _checked(kind: type[P], params: dict[str, Any], key: str) -> P:
    try:
        return kind.model_validate(params)
    except ValidationError as error:
        lines = []
        for violation in error.errors():
            path = ".".join([f"{key}.params", *map(str, violation["loc"])])
            allowed = f"; allowed are {', '.join(kind.model_fields)}" if violation["type"] == "extra_forbidden" else ""
            lines.append(f"{path}: {violation['msg']}{allowed}")
        raise ConfigError("\n".join(lines)) from error

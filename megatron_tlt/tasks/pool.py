"""A finite pool of problems: a data budget, mixed by tiers of difficulty."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from megatron_tlt.errors import ConfigError
from megatron_tlt.tasks.seeding import stable_int
from megatron_tlt.tasks.sources import GeneratedSource, Split
from megatron_tlt.tasks.types import Problem
from megatron_tlt.tasks.wording import ANSWER_IN

Tier = Literal["easy", "medium", "hard"]
TIERS: tuple[Tier, ...] = ("easy", "medium", "hard")
_EASY, _HARD = 2 / 3, 1 / 3
_ALLOWED = "allowed: a file of `tlt calibrate`"
_SEARCHED = 50  # problems looked at for each of the pool


def tier_of(pass_rate: float) -> Tier:
    """The tier of a pass rate: easy from 2/3 on, hard up to 1/3 (Learning from Less: 67-100, 34-66, 0-33 %)."""
    return "easy" if pass_rate >= _EASY - 1e-9 else "hard" if pass_rate <= _HARD + 1e-9 else "medium"


class PoolSource:
    """Some problems of a generated source, each once per epoch, shuffled anew in every epoch.

    A problem has the same uid in every epoch, so suffix trees and length classes meet it again.

    Args:
        source: of the train split.
        indices: of the pool's problems in it.
        seed: of the order.
        tiers: the tier of each, for its metadata; empty without.
    """

    def __init__(self, source: GeneratedSource, indices: Sequence[int], seed: int, tiers: Sequence[str] = ()) -> None:
        self.label, self.source = source.label, source
        self._seed = seed
        self._problems = [replace(source.problem(index), recurs=True) for index in indices]
        if tiers:
            pairs = zip(self._problems, tiers, strict=True)
            self._problems = [replace(one, metadata={**one.metadata, "tier": tier}) for one, tier in pairs]
        self._epoch: int | None = None
        self._order: list[int] = []

    def __len__(self) -> int:
        return len(self._problems)

    def problem(self, index: int) -> Problem:
        """The problem at this index."""
        epoch, position = divmod(index, len(self))
        if epoch != self._epoch:
            self._order = list(range(len(self)))
            random.Random(stable_int(self._seed, self.label, "epoch", epoch)).shuffle(self._order)
            self._epoch = epoch
        return self._problems[self._order[position]]


def first_different(source: GeneratedSource, count: int, where: str) -> list[int]:
    """The indices of the first ``count`` problems of a source of which no two are the same.

    Raises:
        ConfigError: there are not so many among 50 times as many; names ``where`` the number was given.
    """
    seen: set[str] = set()
    found: list[int] = []
    for index in range(_SEARCHED * count):
        identity = identity_of(source.problem(index))
        if identity not in seen:
            seen.add(identity)
            found.append(index)
            if len(found) == count:
                return found
    raise ConfigError(
        f"{where}: found {count}; {_SEARCHED * count} draws have {len(found)} different problems; allowed: up to "
        "that many, or wider params"
    )


def identity_of(problem: Problem) -> str:
    """Equal for problems that are the same: the canonical form, or the prompt where the task has none."""
    return str(problem.metadata.get("canonical", problem.prompt))


@dataclass(frozen=True)
class CalibratedTask:
    """What ``tlt calibrate`` found out about a task.

    ``problems``: of each its index, digest, passes, samples, and the digest of how it was asked; None in files of
    earlier releases.
    """

    problems: list[tuple[int, str, int, int, str | None]]

    def pool(
        self, source: GeneratedSource, mix: Mapping[str, float], count: int, key: str, file: Path, *, compare: bool
    ) -> tuple[list[int], list[str]]:
        """Indices and tiers of a pool of ``count`` problems, in shares of ``mix``, by largest remainder.

        ``compare``: with the problems of the source, by their digests.

        Raises:
            ConfigError: a tier has too few problems, or the file is of other problems, or of the same ones asked
                otherwise; names ``key`` and ``file``.
        """
        wanted = _counts(mix, count)
        indices: list[int] = []
        tiers: list[str] = []
        for tier, number in wanted.items():
            own = [one for one in self.problems if tier_of(one[2] / one[3]) == tier]
            if len(own) < number:
                raise ConfigError(
                    f"{key}.tier_mix.{tier}: found a share of {number} problems; {file} has {len(own)} of this tier; "
                    "allowed: a smaller budget or share, or `tlt calibrate` with more problems"
                )
            for index, digest, _, _, asked in own[:number]:
                problem = source.problem(index) if compare else None
                if problem is not None and digest_of(problem) != digest:
                    raise ConfigError(
                        f"{key}.tier_file: problem {index} of {file} is another one than the task's; allowed: a file "
                        "that `tlt calibrate` wrote for the same params, seed and held-out fraction"
                    )
                if problem is not None and asked is not None and asked_digest(problem) != asked:
                    raise ConfigError(
                        f"{key}.tier_file: problem {index} of {file} was asked otherwise than the task does; allowed: "
                        "a file that `tlt calibrate` wrote for the same params, answer_format, instruction, "
                        "system_prompt, chat and environment"
                    )
                indices.append(index)
                tiers.append(tier)
        return indices, tiers


def digest_of(problem: Problem) -> str:
    """Sixteen hexadecimal digits of a problem's identity."""
    return f"{stable_int('identity', identity_of(problem)):016x}"


def asked_digest(problem: Problem) -> str:
    """Sixteen hexadecimal digits of what the policy sees of a problem, and where its answer is looked for."""
    seen = [problem.prompt, problem.metadata.get("messages"), problem.metadata.get(ANSWER_IN)]
    text = json.dumps([*seen, problem.environment, problem.tools], sort_keys=True)
    return f"{stable_int('asked', text):016x}"


def read_tiers(path: Path, label: str, key: str, split: Split) -> CalibratedTask:
    """The part of a file of tiers about one task.

    Raises:
        ConfigError: the file is missing, is not one of `tlt calibrate`, is of the other split, has nothing about the
            task, or has a problem twice.
    """
    where = f"{key}.tier_file"
    try:
        found: Any = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{where}: cannot read {path}: {error.strerror}; {_ALLOWED}") from error
    except ValueError as error:
        raise ConfigError(f"{where}: {path} is not JSON: {error}; {_ALLOWED}") from error
    try:
        tasks, own_split = found["tasks"], found.get("split", "train")
        rows = tasks.get(label)
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{where}: {path} has no 'tasks'; {_ALLOWED}") from error
    if own_split != split:
        raise ConfigError(
            f"{where}: {path} has {own_split} problems, not {split} ones; allowed: a file of `tlt calibrate --split "
            f"{split}`"
        )
    if rows is None:
        raise ConfigError(
            f"{where}: {path} has nothing about '{label}'; it has {', '.join(sorted(tasks)) or 'no task'}; {_ALLOWED} "
            "for this task"
        )
    try:
        problems = [
            (int(r["index"]), str(r["digest"]), int(r["passed"]), int(r["samples"]), r.get("asked")) for r in rows
        ]
        bad = next((row for row in problems if not 0 <= row[2] <= row[3] or row[3] < 1 or row[0] < 0), None)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{where}: {path}, task '{label}': a row lacks index, digest, passed or samples, or has another type; "
            f"{_ALLOWED}"
        ) from error
    if bad is not None:
        raise ConfigError(
            f"{where}: {path}, task '{label}', problem {bad[0]}: found {bad[2]} of {bad[3]} passed; allowed: an index "
            "from 0, at least one sample, and from 0 to all of them passed"
        )
    twice = [index for index, count in Counter(index for index, *_ in problems).items() if count > 1]
    if twice:
        raise ConfigError(f"{where}: {path}, task '{label}': problem {twice[0]} is there twice; allowed: each once")
    return CalibratedTask(problems)


def calibrated_model(path: Path) -> str | None:
    """The folder of the model whose pass rates a file of tiers has; None if it does not say so or is unreadable."""
    try:
        found = json.loads(path.read_text("utf-8")).get("model")
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, str) else None


def _counts(mix: Mapping[str, float], count: int) -> dict[Tier, int]:
    exact = {tier: count * mix.get(tier, 0.0) / sum(mix.values()) for tier in TIERS}
    counts = {tier: int(value) for tier, value in exact.items()}
    by_remainder = sorted(TIERS, key=lambda tier: counts[tier] - exact[tier])
    for tier in by_remainder[: count - sum(counts.values())]:
        counts[tier] += 1
    return counts

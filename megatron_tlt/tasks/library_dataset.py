"""Any dataset of reasoning-gym as a task, with its own prompts, parameters and scorer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from megatron_tlt.config.violations import closest
from megatron_tlt.errors import ConfigError
from megatron_tlt.tasks.generator import DrawnProblem, Worked
from megatron_tlt.tasks.marker import ANSWER_MARKER, worked_solution
from megatron_tlt.tasks.seeding import stable_int

_SEEDS = 1 << 31  # numpy's generators, which some datasets use, take 32 bits
_OWN = ("seed", "size")
_STEPS = "answer_cot"
"""Metadata keys that may contain a worked solution ending in the marked answer (gsm_symbolic)."""


class LibraryDataset:
    """``draw`` is a pure function of its key.

    Args:
        name: of the dataset in the library's registry.
        params: fields of its config, except ``seed`` and ``size``.
        key: the task's key in the launch config, for errors.

    Raises:
        ConfigError: unknown dataset or parameter, a value that the library refuses, or a dataset whose scorer does not
            give its own answer the full score after the problem was converted through JSON.
    """

    def __init__(self, name: str, params: dict[str, Any], key: str) -> None:
        from reasoning_gym.factory import DATASETS  # slow to import (seconds), and most commands do not need it

        if name not in DATASETS:
            raise ConfigError(f"{key}.name: unknown dataset '{name}' of reasoning-gym; {closest(name, DATASETS)}")
        fields = [field for field in DATASETS[name][1].__dataclass_fields__ if field not in _OWN]
        if unknown := [f"{key}.params.{field}: {closest(field, fields)}" for field in params if field not in fields]:
            raise ConfigError("\n".join(unknown))
        self.name, self._params = name, params
        try:
            entry = self._entry(0)
            score = self._score_own_answer(entry)
        except Exception as error:  # a dataset may raise anything
            raise ConfigError(f"{key}.params: reasoning-gym refuses them for '{name}': {error}") from error
        if score < 1.0:
            raise ConfigError(
                f"{key}.name: the scorer of '{name}' gives {score:g} to the dataset's own answer; such a reward "
                "cannot be learned from; allowed: another dataset"
            )

    def draw(self, key: int) -> DrawnProblem:
        """The problem of ``key``, any non-negative integer; with a worked solution if the dataset provides one."""
        entry = self._entry(key)
        worked = Worked(entry["question"], str(entry["answer"] or ""), _solution(entry))
        params = json.dumps(self._params, sort_keys=True)
        return DrawnProblem(worked, {"dataset": self.name, "params": params, "entry": self._kept(entry)})

    def probe(self, count: int) -> list[DrawnProblem]:
        """Some draws, for checks."""
        return [self.draw(stable_int("probe", i)) for i in range(count)]

    @property
    def probed(self) -> str:
        """Description of the probed draws for error messages."""
        return f"name: '{self.name}'"

    def _dataset(self, key: int) -> Any:
        import reasoning_gym

        # Size 1, because some datasets compute all their problems on construction.
        return reasoning_gym.create_dataset(self.name, seed=stable_int("entry", key) % _SEEDS, size=1, **self._params)

    def _entry(self, key: int) -> dict[str, Any]:
        return dict(self._dataset(key)[0])

    def _kept(self, entry: dict[str, Any]) -> dict[str, Any]:
        """The entry's data for the scorer, converted through JSON; values without a JSON type become text."""
        kept = {name: entry[name] for name in ("question", "answer", "metadata")}
        return dict(json.loads(json.dumps(kept, default=str)))

    def _score_own_answer(self, entry: dict[str, Any]) -> float:
        """The score of the entry's own answer; 1 if it has none, because its scorer checks the response directly."""
        if entry["answer"] is None:
            return 1.0
        return float(self._dataset(0).score_answer(entry["answer"], self._kept(entry)))


def _solution(entry: Mapping[str, Any]) -> str | None:
    """The worked solution of an entry, if its last line is a marked answer.

    The entry's own answer replaces that answer, whose notation may differ: 30.0 for 30.
    """
    steps = entry["metadata"].get(_STEPS)
    if not isinstance(steps, str):
        return None
    *lines, last = steps.split("\n")
    return worked_solution(lines, entry["answer"]) if last.startswith(ANSWER_MARKER) else None

"""A user's function or class as a task, loaded by import path; each call draws one problem."""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from megatron_tlt.config.import_path import is_import_path, load_object, one_line
from megatron_tlt.errors import ConfigError
from megatron_tlt.tasks.generator import DrawnProblem, Worked
from megatron_tlt.tasks.marker import ANSWER_MARKER
from megatron_tlt.tasks.seeding import stable_int

_KEYS = ("prompt", "answer", "solution", "metadata")


class PythonTask:
    """``draw`` is a pure function of its key.

    A function is called with ``(rng, **params)``. A class is constructed once with ``params``, and its instance is
    called with ``(rng)``. All randomness must come from ``rng``, a ``random.Random``. A call returns a mapping:

    - ``prompt``: text; it determines whether the problem is held out, so the train and held-out sets are disjoint.
    - ``answer``: text or a number, for the verifier.
    - ``solution``, optional: a worked response whose last line is ``#### answer``, for a supervised warm-up.
    - ``metadata``, optional: further data for the verifier, of JSON types.

    Args:
        path: import path of the function or class.
        params: its parameters.
        key: the task's key in the launch config, for errors.

    Raises:
        ConfigError: there is no such function or class, it refuses ``params``, it raises or returns anything else, or
            two calls with equally seeded generators return different problems.
    """

    def __init__(self, path: str, params: dict[str, Any], key: str) -> None:
        self._path, self._where = path, f"{key}.name"
        if not is_import_path(path):
            raise ConfigError(
                f"{self._where}: found {path!r}; allowed for kind python: the import path of a function or class, such "
                "as mypackage.tasks.sums"
            )
        found = load_object(path, self._where, callable, "function or class", "a function or class")
        is_class = isinstance(found, type)
        try:
            inspect.signature(found).bind(*([] if is_class else [None]), **params)
            self._call: Callable[[random.Random], Any] = found(**params) if is_class else partial(found, **params)
        except Exception as error:  # a user's constructor may raise anything
            takes = f"{path}{inspect.signature(found)}"
            raise ConfigError(f"{key}.params: found {params}; {takes} refuses them: {one_line(error)}") from error
        if self.draw(0) != self.draw(0):
            raise ConfigError(
                f"{self._where}: {path} returned different problems for equally seeded generators; allowed: all "
                "randomness comes from rng, and no state is kept between calls"
            )

    def draw(self, key: int) -> DrawnProblem:
        """The problem of ``key``, any non-negative integer.

        Raises:
            ConfigError: the function raises, or does not return a mapping as described in the class.
        """
        try:
            found = self._call(random.Random(stable_int("entry", key)))
        except Exception as error:
            raise ConfigError(f"{self._where}: {self._path} raised {one_line(error)}") from error
        if not isinstance(found, Mapping):
            raise self._wrong(f"a {type(found).__name__}", "a mapping with prompt and answer")
        for name in ("prompt", "answer"):
            if name not in found:
                raise self._wrong(f"a mapping without {name!r}", f"the keys {', '.join(_KEYS)}")
        if unknown := [name for name in found if name not in _KEYS]:
            raise self._wrong(f"a mapping with {unknown[0]!r}", f"the keys {', '.join(_KEYS)}")
        prompt, answer, solution = found["prompt"], found["answer"], found.get("solution")
        if not isinstance(prompt, str) or not prompt.strip():
            raise self._wrong(f"the prompt {prompt!r}", "text that is not empty")
        if isinstance(answer, bool) or not isinstance(answer, str | int | float):
            raise self._wrong(f"the answer {answer!r}", "text or a number")
        if solution is not None and not _is_marked(solution):
            raise self._wrong(
                f"the solution {solution!r}", f"text whose last line is '{ANSWER_MARKER} answer', or None"
            )
        return DrawnProblem(Worked(prompt, str(answer), solution), self._metadata(found.get("metadata")))

    def probe(self, count: int) -> list[DrawnProblem]:
        """Some draws, for checks."""
        return [self.draw(stable_int("probe", i)) for i in range(count)]

    @property
    def probed(self) -> str:
        """Description of the probed draws for error messages."""
        return f"name: '{self._path}'"

    def _metadata(self, metadata: Any) -> dict[str, Any]:
        """The metadata converted through JSON, as in the verifier's process."""
        try:
            kept = json.loads(json.dumps({} if metadata is None else metadata))
        except (TypeError, ValueError) as error:
            raise self._wrong("metadata that is not JSON", f"a mapping of JSON values ({one_line(error)})") from error
        if not isinstance(kept, dict):
            raise self._wrong(f"the metadata {metadata!r}", "a mapping of JSON values")
        return kept

    def _wrong(self, found: str, allowed: str) -> ConfigError:
        return ConfigError(f"{self._where}: {self._path} returned {found}; allowed: {allowed}")


def _is_marked(solution: Any) -> bool:
    return isinstance(solution, str) and solution.rpartition("\n")[2].startswith(ANSWER_MARKER)

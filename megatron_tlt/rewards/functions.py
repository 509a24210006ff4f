"""Users' functions as verifiers, by import path: ``(problem, response_text) -> number, mapping or Reward``."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Mapping
from dataclasses import asdict
from functools import lru_cache
from numbers import Real
from typing import Any

from megatron_tlt.config.import_path import load_object
from megatron_tlt.errors import ConfigError
from megatron_tlt.rewards.types import Reward, Verifier
from megatron_tlt.tasks.types import Problem

_KEYS = ("value", "score", "correct", "extracted")
_ALLOWED = "a number, a mapping with value (or score) and optionally correct and extracted, or a Reward"
_SHOWN_CHARACTERS = 80


@lru_cache(maxsize=64)
def load_function(path: str, key: str) -> Verifier:
    """The function at ``path`` as a verifier; :func:`as_reward` defines its allowed results.

    A coroutine function completes before the next response. All coroutines share one event loop, so that an HTTP client
    can be reused between calls.

    Raises:
        ConfigError: there is no such function, or it does not take a problem and a text.
    """
    function = load_object(path, key, _is_function, "function", "a function (problem, response_text)")
    try:
        inspect.signature(function).bind(None, "")
    except TypeError as error:
        found = f"{path}{inspect.signature(function)}"
        raise ConfigError(f"{key}: found {found}; allowed: a function that takes (problem, response_text)") from error
    except ValueError:
        pass  # a C function without a signature

    def verify(problem: Problem, response: str) -> Reward:
        found = function(problem, response)
        return as_reward(_runner().run(_result(found)) if inspect.isawaitable(found) else found, path)

    return verify


def as_reward(found: Any, path: str) -> Reward:
    """Converts the result of the function at ``path`` to a reward.

    A number is the reward's value. A mapping has ``value`` (or ``score``) and optionally ``correct`` (true or false)
    and ``extracted`` (the judged answer, text or None). Without ``correct``, a value above 0 counts as correct; a
    function with partial rewards should therefore return it.

    Raises:
        TypeError: anything else; names the function, what was found and what is allowed.
    """
    if isinstance(found, Reward):
        fields = {name: value for name, value in asdict(found).items() if name not in ("error", "late")}
    elif isinstance(found, Mapping):
        fields = dict(found)
    elif isinstance(found, Real):
        fields = {"value": found}
    else:
        raise _wrong(path, found, _ALLOWED)
    if unknown := [key for key in fields if key not in _KEYS]:
        raise _wrong(path, found, f"the keys {', '.join(_KEYS)}, not {unknown[0]!r}")
    if ("value" in fields) == ("score" in fields):
        raise _wrong(path, found, "one of value and score")
    value = fields["value"] if "value" in fields else fields["score"]
    if not isinstance(value, Real) or not math.isfinite(value):
        raise _wrong(path, found, "a finite number as value")
    value = float(value)
    correct, extracted = fields.get("correct", value > 0), fields.get("extracted")
    if not isinstance(correct, bool):
        raise _wrong(path, found, "true or false as correct")
    if not isinstance(extracted, str | None):
        raise _wrong(path, found, "text or None as extracted")
    return Reward(value, correct, extracted, found.error if isinstance(found, Reward) else None)


def _wrong(path: str, found: Any, allowed: str) -> TypeError:
    shown = repr(found)
    shown = shown if len(shown) <= _SHOWN_CHARACTERS else shown[:_SHOWN_CHARACTERS] + "..."
    return TypeError(f"{path} returned {shown} ({type(found).__name__}); allowed: {allowed}")


def _is_function(item: Any) -> bool:
    return callable(item) and not isinstance(item, type)


async def _result(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


@lru_cache(maxsize=1)
def _runner() -> asyncio.Runner:
    return asyncio.Runner()

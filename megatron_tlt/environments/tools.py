"""Classes whose public methods are tools, as TRL's environments are: calls stand in the policy's turns as JSON."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatron_tlt.config.import_path import one_line
from megatron_tlt.environments.interface import Observation
from megatron_tlt.errors import ConfigError

if TYPE_CHECKING:
    from megatron_tlt.tasks.types import Problem

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_OWN = frozenset({"reset", "get_reward", "close"})


class ToolEnvironment:
    """Makes an environment of an object with ``reset()``, tool methods and, optionally, ``get_reward()``.

    A turn calls tools as ``<tool_call>{"name": "...", "arguments": {...}}</tool_call>``, the form that the templates of
    Qwen, Hermes and others teach. Every call of a turn is answered, in order; a turn without one ends the episode.
    ``reset`` gets the keys of the problem's metadata that it has parameters for, and ``prompt`` and ``answer``.
    A tool's error is what the policy reads.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._tools = tools_of(inner)

    def tool_schemas(self) -> list[dict[str, Any]]:
        """What a chat template shows of the tools: name, description, and parameters as a JSON schema, sorted by name.

        Raises:
            ConfigError: a tool lacks type hints or a docstring that describes its arguments.
        """
        from transformers.utils import get_json_schema

        schemas = []
        for name, method in self._tools.items():
            try:
                schemas.append(get_json_schema(method))
            except Exception as error:  # transformers has its own for hints and for docstrings
                raise ConfigError(
                    f"tool {name} cannot be described: {one_line(error)}; allowed: type hints and a docstring with "
                    "Args, or tools_in_prompt: false"
                ) from error
        return schemas

    async def reset(self, problem: Problem, seed: int) -> None:
        """See ``Environment.reset``."""
        known = {**problem.metadata, "prompt": problem.prompt, "answer": problem.answer, "seed": seed}
        parameters = inspect.signature(self._inner.reset).parameters.values()
        takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
        names = {one.name for one in parameters}
        await _result(self._inner.reset(**{k: v for k, v in known.items() if takes_all or k in names}))

    async def step(self, turn: str) -> Observation:
        """See ``Environment.step``."""
        calls = _CALL.findall(turn)
        if calls:
            return Observation("\n".join([await self._call(call) for call in calls]))
        reward = getattr(self._inner, "get_reward", None)
        return Observation(None, None if reward is None else await _result(reward()))

    async def close(self) -> None:
        """Closes the inner object, if it can be."""
        if hasattr(self._inner, "close"):
            await _result(self._inner.close())

    async def _call(self, text: str) -> str:
        try:
            call = json.loads(text)
            name, arguments = call["name"], call.get("arguments", {})
            if name not in self._tools:
                return f"error: no tool {name!r}; there are {', '.join(sorted(self._tools))}"
            return str(await _result(self._tools[name](**arguments)))
        except Exception as error:  # of the policy's JSON or of a tool: the policy reads what is wrong
            return f"error: {type(error).__name__}: {error}"


def find_calls(turn: str) -> list[tuple[str, dict[str, Any]]]:
    """Name and arguments of each well-formed call of a turn, in order."""
    found = []
    for text in _CALL.findall(turn):
        try:
            call = json.loads(text)
            name, arguments = call["name"], call.get("arguments", {})
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
        if isinstance(name, str) and isinstance(arguments, dict):
            found.append((name, arguments))
    return found


def without_calls(turn: str) -> str:
    """A turn's text around its calls."""
    return _CALL.sub("", turn).strip()


def tools_of(inner: Any) -> dict[str, Callable[..., Any]]:
    """An object's public methods, without ``reset``, ``get_reward`` and ``close``."""
    methods = inspect.getmembers(inner, callable)
    return {name: method for name, method in methods if not name.startswith("_") and name not in _OWN}


async def _result(found: Any) -> Any:
    return await found if inspect.isawaitable(found) else found

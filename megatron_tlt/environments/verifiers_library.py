"""Environments of the ``verifiers`` library: its rollout asks for a turn, and the policy's tokens answer."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from megatron_tlt.environments.interface import Observation
from megatron_tlt.environments.tools import find_calls, without_calls
from megatron_tlt.errors import ConfigError, RunError

if TYPE_CHECKING:
    from megatron_tlt.tasks.types import Problem

_ROW = "verifiers"
"""Metadata key of what the library needs of a row besides its messages."""


class VerifiersEnvironment:
    """One rollout of an environment of ``verifiers`` (releases 0.1), with its tools, stop conditions and rubric.

    The library runs its own loop; what it asks of a model is answered by the policy's turns. An episode that a limit of
    the launch config cuts off has reward 0, so ``max_turns`` should be no less than the environment's own. The
    library's messages may be appended only: one that changes earlier messages ends the episode with an error.

    Args:
        id: of ``verifiers.load_environment``; its package must be installed.
        args: the environment's arguments.
    """

    def __init__(self, id: str, args: Mapping[str, Any] | None = None) -> None:
        self._environment = _load(id, json.dumps(dict(args or {}), sort_keys=True))
        self._asked: asyncio.Queue[Sequence[Any]] = asyncio.Queue()
        self._said: asyncio.Queue[str] = asyncio.Queue()
        self._known = 0  # messages that the policy has read or said
        self._run: asyncio.Task[Any] | None = None

    def tool_schemas(self) -> list[dict[str, Any]]:
        """The environment's tools as a chat template takes them."""
        tools = self._environment.tool_defs
        keys = ("name", "description", "parameters")
        return [{"type": "function", "function": {key: getattr(tool, key) for key in keys}} for tool in tools or ()]

    async def reset(self, problem: Problem, seed: int) -> None:
        """See ``Environment.reset``. The library has no seed: an environment's own randomness is its own.

        Raises:
            RunError: the problem is not a row of :class:`VerifiersRows`, or the rollout ends before its first turn.
        """
        if _ROW not in problem.metadata:
            raise RunError(
                f"problem {problem.uid}: found no row of a verifiers environment; allowed: a task of kind python whose "
                "name is megatron_tlt.environments.verifiers_library.VerifiersRows"
            )
        row = {**problem.metadata[_ROW], "prompt": problem.metadata["messages"], "answer": problem.answer}
        client = _client(self._asked, self._said)
        self._run = asyncio.ensure_future(self._environment.run_rollout(row, client, "policy", {}))
        if (await self._next()).text is None:
            raise RunError("the rollout ended before its first turn")

    async def step(self, turn: str) -> Observation:
        """See ``Environment.step``."""
        self._said.put_nowait(turn)
        return await self._next()

    async def close(self) -> None:
        """Ends the library's rollout."""
        if self._run is not None:
            self._run.cancel()
            await asyncio.gather(self._run, return_exceptions=True)

    async def _next(self) -> Observation:
        assert self._run is not None
        asked = asyncio.ensure_future(self._asked.get())
        await asyncio.wait({asked, self._run}, return_when=asyncio.FIRST_COMPLETED)
        if not asked.done():
            asked.cancel()
            return Observation(None, _reward(self._run.result()))
        messages = asked.result()
        new = messages[self._known :]
        # The policy's own turn is the first of the new messages, except before the first turn.
        if self._known:
            if len(new) < 2 or new[0].role != "assistant":
                raise RunError("the environment changed earlier messages; allowed: messages are only appended")
            new = new[1:]
        self._known = len(messages)
        return Observation("\n".join(str(message.content) for message in new), 0.0)


class VerifiersRows:
    """A task of kind ``python``: problems are rows of an environment's data set.

    Args:
        id, args: as of :class:`VerifiersEnvironment`.
        dataset: the environment's training or evaluation data set. Held-out problems are a part of either
            (``held_out_fraction``).

    Raises:
        ConfigError: the environment cannot be loaded, or a prompt has other messages than texts.
    """

    def __init__(
        self, id: str, args: Mapping[str, Any] | None = None, dataset: Literal["train", "eval"] = "train"
    ) -> None:
        environment = _load(id, json.dumps(dict(args or {}), sort_keys=True))
        if dataset not in ("train", "eval"):
            raise ConfigError(f"dataset: found {dataset!r}; allowed: train, eval")
        self._id = id
        self._rows = environment.get_dataset() if dataset == "train" else environment.get_eval_dataset()

    def __call__(self, rng: random.Random) -> dict[str, Any]:
        """A row, drawn from all rows."""
        row = self._rows[rng.randrange(len(self._rows))]
        messages = [{"role": one["role"], "content": one["content"]} for one in row["prompt"]]
        for one in messages:
            if not isinstance(one["content"], str):
                raise ConfigError(
                    f"verifiers environment {self._id}: a message holds {one['content']!r}; allowed: text"
                )
        kept = {key: row[key] for key in ("example_id", "info") if key in row}
        metadata = {"messages": messages, _ROW: kept}
        return {"prompt": messages[-1]["content"], "answer": row.get("answer") or "", "metadata": metadata}


@lru_cache(maxsize=16)
def _load(name: str, arguments: str) -> Any:
    try:
        import verifiers
    except ImportError as error:
        raise ConfigError(
            f"verifiers environment {name}: the library cannot be imported ({error}); install it with "
            "pip install --no-deps -r requirements/verifiers.txt"
        ) from error
    if not verifiers.__version__.startswith("0.1."):
        raise ConfigError(f"verifiers environment {name}: found release {verifiers.__version__}; allowed: 0.1")
    try:
        return verifiers.load_environment(name, **json.loads(arguments))
    except Exception as error:  # the library and the environment's package raise any type
        raise ConfigError(f"verifiers environment {name} cannot be loaded: {error}") from error


def _reward(output: Mapping[str, Any]) -> dict[str, Any]:
    """A reward of 1 or more counts as correct."""
    if output.get("error") is not None:
        raise RunError(f"the verifiers environment failed: {output['error']}")
    return {"value": float(output["reward"]), "correct": output["reward"] >= 1}


def _client(asked: asyncio.Queue[Sequence[Any]], said: asyncio.Queue[str]) -> Any:
    """A client of the library whose model is whoever reads ``asked`` and writes ``said``."""
    from verifiers.clients import Client
    from verifiers.types import Response, ResponseMessage, ToolCall

    class PolicyClient(Client):
        def setup_client(self, config: Any) -> Any:
            return config

        async def to_native_tool(self, tool: Any) -> Any:
            return tool

        async def to_native_prompt(self, messages: Any) -> tuple[Any, dict[str, Any]]:
            return messages, {}

        async def get_native_response(
            self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any
        ) -> Any:
            asked.put_nowait(prompt)
            return bool(tools), await said.get()

        async def raise_from_native_response(self, response: Any) -> None:
            """A turn is never invalid."""

        async def from_native_response(self, response: Any) -> Any:
            has_tools, turn = response
            calls = find_calls(turn) if has_tools else []
            message = ResponseMessage(
                content=without_calls(turn) if calls else turn,
                finish_reason="tool_calls" if calls else "stop",
                is_truncated=False,
                tool_calls=[
                    ToolCall(id=f"call-{index}", name=name, arguments=json.dumps(arguments))
                    for index, (name, arguments) in enumerate(calls)
                ]
                or None,
            )
            return Response(id="turn", created=0, model="policy", message=message)

        async def close(self) -> None:
            """There is no connection."""

    return PolicyClient(None)

"""Environments of the real verifiers library: turns, tools, rubrics and data sets."""

from __future__ import annotations

import asyncio
import importlib
import os
import random
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_tlt.config.task import EnvironmentConfig, TaskConfig
from megatron_tlt.environments import verifiers_library
from megatron_tlt.environments.interface import Observation
from megatron_tlt.environments.pool import EnvironmentPool
from megatron_tlt.environments.registry import environment_problems, tool_schemas
from megatron_tlt.environments.verifiers_library import VerifiersEnvironment, VerifiersRows
from megatron_tlt.errors import ConfigError, RunError
from megatron_tlt.rewards.types import Reward
from megatron_tlt.tasks import build_sources
from megatron_tlt.tasks.types import Problem
from tests.helpers.launch import REPOSITORY
from tests.helpers.user_code import add_module

LIBRARY = Path(os.environ.get("TLT_VERIFIERS", REPOSITORY / ".venv" / "verifiers"))
ROWS = "megatron_tlt.environments.verifiers_library.VerifiersRows"
GUESS = '''
import verifiers as vf
from datasets import Dataset


def load_environment(top=9, kind="guess"):
    rows = [{"question": f"Guess {i}.", "answer": str(i), "info": {"hint": i + 1}} for i in range(top)]
    given = {"dataset": Dataset.from_list(rows), "system_prompt": "Be quick."}

    def right(completion, answer, **_):
        return 1.0 if completion[-1].content == answer else 0.25

    if kind == "tools":

        def add(a: int, b: int) -> int:
            """Adds two numbers.

            Args:
                a: the first.
                b: the second.
            """
            return a + b

        return vf.ToolEnv(tools=[add], rubric=vf.Rubric(funcs=[right]), **given)

    class Guess(vf.MultiTurnEnv):
        async def env_response(self, messages, state, **_):
            if kind == "breaks":
                raise vf.Error("the server is gone")
            return [vf.UserMessage(content=f"no, less than {state['info']['hint']}")]

        async def get_prompt_messages(self, state):
            prompt = await super().get_prompt_messages(state)
            return prompt[1:] if kind == "forgets" and state["trajectory"] else prompt

        @vf.stop
        async def found(self, state, **_):
            steps = state["trajectory"]
            return bool(steps) and steps[-1]["completion"][-1].content == state["answer"]

    return Guess(max_turns=3, rubric=vf.Rubric(funcs=[right]), **given)
'''

pytestmark = pytest.mark.skipif(
    not (LIBRARY / "verifiers").is_dir(),
    reason=f"no verifiers library in {LIBRARY}: tests/run.sh --all installs it",
)


@pytest.fixture(scope="module", autouse=True)
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("code")
    with pytest.MonkeyPatch.context() as monkeypatch:
        add_module(folder, "guess_env", GUESS, monkeypatch)
        add_module(folder, "no_env", "", monkeypatch)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.environ["PYTHONPATH"], str(LIBRARY)]))
        monkeypatch.syspath_prepend(str(LIBRARY))
        importlib.invalidate_caches()
        yield


def problem(**args: Any) -> Problem:
    row = VerifiersRows("guess-env", args)(random.Random(3))
    return Problem("g/1", "g", row["prompt"], row["answer"], "math", row["metadata"])


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


def test_rows_are_problems_in_chats() -> None:
    row = VerifiersRows("guess-env", {"top": 4})(random.Random(3))
    number = int(row["answer"])
    assert row == {
        "prompt": f"Guess {number}.",
        "answer": str(number),
        "metadata": {
            "messages": [
                {"role": "system", "content": "Be quick."},
                {"role": "user", "content": f"Guess {number}."},
            ],
            "verifiers": {"example_id": number, "info": {"hint": number + 1}},
        },
    }
    environment = {"name": "verifiers", "params": {"id": "guess-env", "args": {"kind": "tools"}}}
    task = TaskConfig.model_validate(
        {"kind": "python", "name": ROWS, "params": {"id": "guess-env"}, "environment": environment}
    )
    source = build_sources([task], "train", 0)
    drawn = source.problems(0, 30)
    assert len({one.prompt for one in drawn}) > 3
    assert drawn[0].tools is not None and drawn[0].tools[0]["function"]["name"] == "add"


def test_turns_are_answered_and_the_rubric_gives_the_reward() -> None:
    async def found_at_once() -> None:
        environment, asked = VerifiersEnvironment("guess-env"), problem()
        await environment.reset(asked, 1)
        hint = asked.metadata["verifiers"]["info"]["hint"]
        assert await environment.step("x") == Observation(f"no, less than {hint}", 0.0)
        assert await environment.step(asked.answer) == Observation(None, {"value": 1.0, "correct": True})
        await environment.close()

    async def never_found() -> None:
        environment = VerifiersEnvironment("guess-env")
        await environment.reset(problem(), 1)
        assert [(await environment.step("x")).reward for _ in range(2)] == [0.0, 0.0]
        assert await environment.step("x") == Observation(None, {"value": 0.25, "correct": False})
        await environment.close()

    async def left_early() -> None:
        environment = VerifiersEnvironment("guess-env")
        await environment.close()
        await environment.reset(problem(), 1)
        await environment.close()
        assert environment._run is not None and environment._run.cancelled()

    run(found_at_once())
    run(never_found())
    run(left_early())


def test_tools_are_called_as_the_chat_template_teaches() -> None:
    async def test() -> None:
        environment, asked = VerifiersEnvironment("guess-env", {"kind": "tools"}), problem(kind="tools")
        await environment.reset(asked, 1)
        call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
        assert await environment.step(f"I add. {call}{call}") == Observation("3\n3", 0.0)
        assert await environment.step(asked.answer) == Observation(None, {"value": 1.0, "correct": True})

    run(test())
    config = EnvironmentConfig(name="verifiers", params={"id": "guess-env", "args": {"kind": "tools"}})
    (schema,) = tool_schemas(config, "e") or ()
    assert schema["function"]["parameters"]["required"] == ["a", "b"]
    assert tool_schemas(config.model_copy(update={"tools_in_prompt": False}), "e") is None
    assert tool_schemas(EnvironmentConfig(name="verifiers", params={"id": "guess-env"}), "e") is None


def test_what_the_library_cannot_do_ends_the_episode_with_the_reason() -> None:
    async def fails(kind: str, message: str) -> None:
        environment = VerifiersEnvironment("guess-env", {"kind": kind})
        await environment.reset(problem(), 1)
        with pytest.raises(RunError, match=message):
            await environment.step("x")
        await environment.close()

    run(fails("breaks", "the verifiers environment failed: .*the server is gone"))
    run(fails("forgets", "changed earlier messages"))
    other = Problem("p", "p", "?", "5", "math")
    with pytest.raises(RunError, match="problem p: found no row of a verifiers environment"):
        run(VerifiersEnvironment("guess-env").reset(other, 1))


def test_it_runs_in_the_pools_process() -> None:
    config, asked = EnvironmentConfig(name="verifiers", params={"id": "guess-env"}), problem()
    answers = []
    with EnvironmentPool(1, 60.0) as pool:
        key = pool.start(asked, config, 1)
        for turn in ("x", asked.answer):
            pool.step(key, turn)
            while not (taken := pool.take(20.0)):
                pass
            answers += [answer for _, answer in taken]
    assert answers[0].text is not None and answers[0].text.startswith("no, less than")
    assert (answers[1].text, answers[1].reward) == (None, Reward(1.0, True))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"id": "nothing-env"}, "verifiers environment nothing-env cannot be loaded: "),
        ({"id": "no-env"}, "verifiers environment no-env cannot be loaded: "),
        ({"id": "guess-env", "args": {"bottom": 1}}, "verifiers environment guess-env cannot be loaded: "),
    ],
)
def test_environments_that_cannot_be_loaded_are_refused(params: dict[str, Any], message: str) -> None:
    task = TaskConfig.model_validate({"name": "gcd", "environment": {"name": "verifiers", "params": params}})
    (line,) = environment_problems([task])
    assert line.startswith("tasks[0].environment.params") and message in line


def test_other_releases_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import verifiers

    monkeypatch.setattr(verifiers, "__version__", "0.4.0")
    with pytest.raises(ConfigError, match=r"found release 0.4.0; allowed: 0.1"):
        verifiers_library._load("guess-env", '{"top": 2}')

"""The shipped environments, and what a class has to be to be one."""

from __future__ import annotations

import asyncio
import json
import threading
from fractions import Fraction
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_tlt.config.task import TaskConfig
from megatron_tlt.data.tokenizer import load_tokenizer, prompt_text
from megatron_tlt.environments.calculator import Calculator, calculate
from megatron_tlt.environments.http import HttpEnvironment
from megatron_tlt.environments.interface import Observation
from megatron_tlt.environments.registry import environment_problems, load_environment
from megatron_tlt.environments.search import Search
from megatron_tlt.environments.tools import ToolEnvironment
from megatron_tlt.errors import ConfigError
from megatron_tlt.tasks import build_sources
from megatron_tlt.tasks.types import Problem
from tests.helpers.chat import TEMPLATE, chat_folder

PROBLEM = Problem("p/1", "p", "What is 2 + 3?", "5", "math", {"low": 3})


class Counter:
    """A class of tools, as TRL's."""

    def __init__(self, start: int = 0) -> None:
        self._count = start

    def reset(self, low: int, answer: str) -> None:
        self._count += low
        self._answer = answer

    def add(self, amount: int) -> str:
        self._count += amount
        return f"now {self._count}"

    async def fail(self) -> str:
        raise ValueError("it is broken")

    def get_reward(self) -> float:
        return float(self._count == int(self._answer))


class Weather:
    """Tools that a chat template can show."""

    def reset(self) -> None: ...

    def look_up(self, city: str, days: int = 1) -> str:
        """Looks up the weather.

        Args:
            city: its name.
            days: how many days from now.
        """
        return f"{city}: sun"


class Neither:
    def reset(self) -> None: ...


class NoReset:
    def step(self, turn: str) -> Observation:
        return Observation(None)


@given(st.integers(-99, 99), st.integers(-99, 99), st.integers(1, 99))
def test_the_calculator_is_exact(a: int, b: int, c: int) -> None:
    assert calculate(f"({a} + {b}) * {a} / {c}") == str(Fraction((a + b) * a, c))
    assert Calculator().step(f"I ask <calc>{a} - {b}</calc>") == Observation(str(a - b))


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("1 / 0", "error: division by zero"),
        ("2 ** 9", "error: allowed are numbers"),
        ("__import__('os')", "error: allowed are numbers"),
        ("1 +", "error: allowed are numbers"),
        ("True", "error: allowed are numbers"),
        ("1+" * 150 + "1", "error: 301 characters; allowed: 200"),
        ("(" * 99, "error: allowed are numbers"),
    ],
)
def test_what_cannot_be_calculated_is_answered_with_the_reason(expression: str, reason: str) -> None:
    assert calculate(expression).startswith(reason)


def test_a_turn_without_a_call_ends_the_calculators_episode() -> None:
    assert Calculator().step("The answer is 5") == Observation(None)
    assert Calculator().step("<calc>1 + 1") == Observation(None)
    assert Calculator("[", "]").step("first [1+1], then [2*3]") == Observation("6")


def test_search_ranks_paragraphs_by_rare_words(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("The cat sat.\n\nThe dog ran to the cat.\n \nThe sun is a star.\n")
    search = Search(str(file), results=2)
    assert search.step("<search>the STAR</search>") == Observation("The sun is a star.\n\nThe cat sat.")
    assert search.step("<search>moon</search>") == Observation("nothing found")
    assert search.step("done") == Observation(None)
    file.write_text("\n\n")
    with pytest.raises(ConfigError, match=r"path: .*empty.txt cannot be read"):
        Search(str(tmp_path / "empty.txt"))


def test_tools_are_called_in_order_and_their_errors_are_answers() -> None:
    async def run() -> None:
        environment = load_environment("tests.environments.test_environments.Counter", {"start": 1}, "e")()
        assert isinstance(environment, ToolEnvironment)
        await environment.reset(PROBLEM, 7)
        call = '<tool_call>{"name": "add", "arguments": {"amount": 1}}</tool_call>'
        assert await environment.step(f"{call} and {call}") == Observation("now 5\nnow 6")
        wrong = [
            ('{"name": "sub"}', "error: no tool 'sub'; there are add, fail"),
            ('{"name": "add", "arguments": {"x": 1}}', "error: TypeError: "),
            ('{"name": "fail"}', "error: ValueError: it is broken"),
            ("{", "error: JSONDecodeError: "),
        ]
        for text, answer in wrong:
            found = (await environment.step(f"<tool_call>{text}</tool_call>")).text
            assert found is not None and found.startswith(answer)
        assert await environment.step("It is 5.") == Observation(None, 0.0)

    asyncio.run(run())


def test_an_environment_behind_http() -> None:
    seen: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append({"path": self.path, **body, "key": self.headers.get("X-Key")})
            reply: dict[str, Any] = {"text": "go on"} if body.get("turn") != "end" else {"text": None, "reward": 0.5}
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(reply).encode() if self.path == "/step" else b"")

        def log_message(self, *_: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        environment = HttpEnvironment(f"http://127.0.0.1:{server.server_port}/", {"X-Key": "secret"})
        environment.reset(PROBLEM, 7)
        assert environment.step("hello") == Observation("go on")
        assert environment.step("end") == Observation(None, 0.5)
        environment.close()
    finally:
        server.shutdown()
    assert [one["path"] for one in seen] == ["/reset", "/step", "/step", "/close"]
    assert len({one["episode"] for one in seen}) == 1 and {one["key"] for one in seen} == {"secret"}
    assert seen[0]["problem"]["answer"] == "5" and seen[0]["seed"] == 7


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {"name": "nothing"},
            "unknown environment 'nothing'; allowed: calculator, http, search, verifiers, or the ",
        ),
        ({"name": "calculator", "params": {"x": 1}}, r"environment.params: found {'x': 1}; calculator refuses them"),
        ({"name": "tests.environments.test_environments.Neither"}, "has neither a method step nor any tool"),
        ({"name": "tests.environments.test_environments.NoReset"}, "has no method reset"),
        ({"name": "no.such.Thing"}, "'no.such' cannot be imported"),
    ],
)
def test_what_is_no_environment_is_refused_by_key(environment: dict[str, Any], message: str) -> None:
    task = TaskConfig.model_validate({"name": "gcd", "environment": environment})
    (line,) = environment_problems([TaskConfig(name="gcd"), task])
    assert line.startswith("tasks[1].environment") and message in line.replace("\\", "")


def test_the_chat_template_shows_tools(tmp_path: Path) -> None:
    name = "tests.environments.test_environments.Weather"
    task = TaskConfig.model_validate({"name": "gcd", "chat": True, "environment": {"name": name}})
    problem = build_sources([task], "train", 0).problems(0, 1)[0]
    (tool,) = problem.tools or ()
    assert tool["function"]["name"] == "look_up" and tool["function"]["parameters"]["required"] == ["city"]
    shows = "{% for t in tools or [] %}[{{ t.function.name }}: {{ t.function.description }}]{% endfor %}" + TEMPLATE
    text = prompt_text(load_tokenizer(chat_folder(tmp_path / "shows", shows)), problem)
    assert text.startswith("[look_up: Looks up the weather.]user:")
    ignores = load_tokenizer(chat_folder(tmp_path / "ignores"))
    with pytest.raises(ConfigError, match=r"does not show tools; allowed: .*tools_in_prompt: false"):
        prompt_text(ignores, problem)
    task = TaskConfig.model_validate(
        {"name": "gcd", "chat": True, "environment": {"name": name, "tools_in_prompt": False}}
    )
    assert prompt_text(ignores, build_sources([task], "train", 0).problems(0, 1)[0]).startswith("user:")


def test_tools_without_a_description_are_refused() -> None:
    counter = {"name": "tests.environments.test_environments.Counter", "params": {"start": 1}}
    task = TaskConfig.model_validate({"name": "gcd", "environment": counter})
    (line,) = environment_problems([task])
    assert line.startswith("tasks[0].environment.name: ") and "tool add cannot be described: " in line
    allowed = {**counter, "tools_in_prompt": False}
    assert environment_problems([TaskConfig.model_validate({"name": "gcd", "environment": allowed})]) == []

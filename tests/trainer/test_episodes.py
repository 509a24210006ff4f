"""Responses of several turns: what was sampled stays as it is, and the environment's tokens are marked."""

from __future__ import annotations

import random
from array import array
from pathlib import Path
from typing import Any

import pytest

from megatron_tlt.config.task import EnvironmentConfig
from megatron_tlt.data.tokenizer import Tokenizer, load_tokenizer, observation_text
from megatron_tlt.data.tokenizer_training import train_tokenizer
from megatron_tlt.environments.pool import EnvironmentAnswer
from megatron_tlt.errors import ConfigError
from megatron_tlt.rewards.types import Reward
from megatron_tlt.rollout.types import DraftStats, Request, Response, SamplingSpec
from megatron_tlt.tasks.types import Problem
from megatron_tlt.trainer.episodes import Episodes, first_turn
from tests.helpers.chat import TEMPLATE, chat_folder


class Answers:
    """A pool that answers at once, in this process, with what it is told to."""

    def __init__(self, *answers: EnvironmentAnswer) -> None:
        self.answers, self.turns, self.ended = list(answers), list[str](), list[int]()
        self._ready: list[tuple[int, EnvironmentAnswer]] = []
        self._count = 0

    def start(self, problem: Problem, environment: EnvironmentConfig, seed: int) -> int:
        self._count += 1
        return self._count

    def fail(self, number: int) -> None:
        self._ready.append((number, EnvironmentAnswer(None, Reward(0.0, False, error="no start"))))

    def step(self, number: int, turn: str) -> None:
        self.turns.append(turn)
        self._ready.append((number, self.answers.pop(0)))

    def take(self, wait_s: float) -> list[tuple[int, EnvironmentAnswer]]:
        found, self._ready = self._ready, []
        return found

    def end(self, number: int) -> None:
        self.ended.append(number)

    def clear(self) -> None: ...


def problem_with(messages: list[dict[str, str]] | None = None, **environment: Any) -> Problem:
    section = EnvironmentConfig(name="calculator", **environment).model_dump(mode="json")
    metadata = {} if messages is None else {"messages": messages}
    return Problem("p/1", "p", "1+1?", "2", "math", metadata, environment=section)


def request_of(tokenizer: Tokenizer, most: int = 40) -> Request:
    prompt = tuple(tokenizer.encode("1+1?"))
    return Request("0-0", prompt, SamplingSpec(max_tokens=most), seed=5, problem_key="p/1")


def says(request: Request, tokens: list[int], reason: str = "stop") -> Response:
    draft = DraftStats(num_steps=len(tokens), num_tokens=len(tokens))
    log_probs = array("f", [-float(token) for token in tokens])
    return Response(request.request_id, request.prompt_token_ids, array("i", tokens), log_probs, reason, 1.0, draft)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return train_tokenizer(["1+1? calc 2"], 104, tmp_path_factory.mktemp("tokenizer"))


def run(tokenizer: Tokenizer, pool: Answers, problem: Problem, request: Request) -> tuple[Episodes, list[Any]]:
    found: list[Any] = []
    return Episodes([(request, problem)], tokenizer, pool, lambda *whole: found.append(whole)), found  # type: ignore[arg-type]


def test_turns_lie_one_behind_another(tokenizer: Tokenizer) -> None:
    pool = Answers(EnvironmentAnswer("2", None), EnvironmentAnswer(None, Reward(0.7, True)))
    problem, whole = problem_with(max_turn_tokens=6, stop=("</calc>",)), request_of(tokenizer)
    first = first_turn(whole, problem)
    assert (first.sampling.max_tokens, first.sampling.stop) == (6, ("</calc>",))
    episodes, found = run(tokenizer, pool, problem, whole)
    assert episodes.take(wait=True) == []
    said = tokenizer.encode("calc")
    episodes.finished(says(first, said))
    (second,) = episodes.take(wait=True) or []
    shown = tokenizer.encode("\n2\n")
    assert second.prompt_token_ids == (*whole.prompt_token_ids, *said, *shown)
    assert second.request_id == "0-0#1" and second.seed != first.seed and second.problem_key == "p/1"
    assert second.sampling.max_tokens == 6
    end = [*tokenizer.encode("2"), tokenizer.eos_id]
    episodes.finished(says(second, end))
    assert episodes.take(wait=True) is None
    ((response, reward, text),) = found
    assert list(response.token_ids) == [*said, *shown, *end]
    mask = [True] * len(said) + [False] * len(shown) + [True] * len(end)
    assert list(response.loss_mask) == mask and response.turns == 2
    assert list(response.log_probs) == [
        -float(t) if own else 0.0 for t, own in zip(response.token_ids, mask, strict=True)
    ]
    assert response.prompt_token_ids == whole.prompt_token_ids and response.request_id == "0-0"
    assert response.draft.num_tokens == len(said) + len(end)
    assert (reward, text) == (Reward(0.7, True), "2")
    assert pool.turns == ["calc", "2"] and pool.ended == [1]


@pytest.mark.parametrize(
    ("most_turns", "room", "reason", "turns", "ended"),
    [
        (1, 40, "stop", 1, "stop"),
        (3, 8, "stop", 1, "length"),
        (3, 40, "length", 1, "length"),
        (3, 40, "abort", 1, "abort"),
    ],
    ids=["turns", "room", "truncated", "aborted"],
)
def test_an_episode_ends_where_a_limit_is_reached(
    most_turns: int, room: int, reason: str, turns: int, ended: str, tokenizer: Tokenizer
) -> None:
    pool = Answers(EnvironmentAnswer("12345", None))
    episodes, found = run(tokenizer, pool, problem_with(max_turns=most_turns), request_of(tokenizer, room))
    episodes.finished(says(request_of(tokenizer), tokenizer.encode("calc"), reason))
    assert not episodes.take(wait=True)
    ((response, reward, text),) = found
    assert (response.turns, response.finish_reason, reward, text) == (turns, ended, None, "calc")
    assert all(response.loss_mask) and len(response.token_ids) == len(tokenizer.encode("calc"))


def test_a_start_that_fails_ends_the_episode_after_its_first_turn(tokenizer: Tokenizer) -> None:
    pool = Answers()
    episodes, found = run(tokenizer, pool, problem_with(), request_of(tokenizer))
    pool.fail(1)
    assert episodes.take(wait=False) == []
    episodes.finished(says(request_of(tokenizer), tokenizer.encode("calc")))
    assert episodes.take(wait=True) is None
    ((response, reward, _),) = found
    assert response.turns == 1 and reward.error == "no start"


def test_a_chat_reads_as_its_template_writes_it(tmp_path: Path) -> None:
    """Decoded, a response of several turns is the conversation; its tokens are those that were sampled."""
    tokenizer = load_tokenizer(chat_folder(tmp_path / "chat"))
    messages = [{"role": "user", "content": "1+1?"}]
    pool = Answers(EnvironmentAnswer("two", None), EnvironmentAnswer(None, None))
    prompt = tuple(tokenizer.encode(tokenizer.chat_text(messages)))
    request = Request("0-0", prompt, SamplingSpec(max_tokens=90), seed=5)
    problem = problem_with(messages, role="tool")
    episodes, found = run(tokenizer, pool, problem, request)
    episodes.finished(says(request, [*tokenizer.encode("calc"), tokenizer.eos_id]))
    (second,) = episodes.take(wait=True) or []
    episodes.finished(says(second, [*tokenizer.encode("it is 2"), tokenizer.eos_id]))
    assert episodes.take(wait=True) is None
    ((response, _, _),) = found
    conversation = [
        *messages,
        {"role": "assistant", "content": "calc"},
        {"role": "tool", "content": "two"},
        {"role": "assistant", "content": "it is 2"},
    ]
    said = tokenizer.decode([*prompt, *response.token_ids], special_tokens=True)
    assert said == tokenizer.chat_text(conversation, answered=True).removesuffix("\n")


def test_a_turn_that_a_stop_text_ended_is_closed_by_the_template(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(chat_folder(tmp_path / "chat"))
    open_turn = tokenizer.encode("calc")
    end = tokenizer.decode([tokenizer.eos_id], special_tokens=True)
    assert observation_text(tokenizer, "two", open_turn, "user") == f"{end}\nuser:two\nassistant:"
    assert observation_text(tokenizer, "two", [*open_turn, tokenizer.eos_id], "user") == "\nuser:two\nassistant:"


def test_a_template_that_rewrites_turns_is_refused(tmp_path: Path) -> None:
    rewritten = TEMPLATE.replace("{{ m.content }}", "{{ m.content | upper }}")
    tokenizer = load_tokenizer(chat_folder(tmp_path / "chat", rewritten))
    messages = [{"role": "user", "content": "?"}]
    with pytest.raises(ConfigError, match="changes the text of an earlier turn"):
        run(tokenizer, Answers(), problem_with(messages), request_of(tokenizer))


def test_many_episodes_of_random_turns_keep_every_sampled_token(tokenizer: Tokenizer) -> None:
    """1,000 turns: every token in the loss is the one that was sampled, in its place and with its log-prob."""
    rng = random.Random(0)
    turns = 0
    while turns < 1000:
        answers = [EnvironmentAnswer("9" * rng.randrange(1, 5), None) for _ in range(rng.randrange(5))]
        pool = Answers(*answers, EnvironmentAnswer(None, None))
        problem, whole = problem_with(max_turns=4), request_of(tokenizer, rng.randrange(20, 60))
        episodes, found = run(tokenizer, pool, problem, whole)
        request, sampled = first_turn(whole, problem), list[tuple[int, int]]()
        while True:
            count = rng.randrange(1, min(8, request.sampling.max_tokens) + 1)
            tokens = [rng.randrange(3, tokenizer.vocab_size) for _ in range(count)]
            at = len(request.prompt_token_ids) - len(whole.prompt_token_ids)
            sampled += enumerate(tokens, start=at)
            turns += 1
            episodes.finished(says(request, tokens, "length" if count == request.sampling.max_tokens else "stop"))
            more = episodes.take(wait=True)
            if not more:
                break
            (request,) = more
        ((response, _, _),) = found
        assert len(response.token_ids) <= whole.sampling.max_tokens
        kept = [(at, t) for at, (t, own) in enumerate(zip(response.token_ids, response.loss_mask, strict=True)) if own]
        assert kept == sampled
        assert [response.log_probs[at] for at, _ in kept] == [-float(t) for _, t in kept]

"""Requests that begin during a rollout: the next turns of responses, in the real engine."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from megatron_tlt.errors import ConfigError
from megatron_tlt.rollout.types import Request, Response, SamplingSpec
from megatron_tlt.speculation.strategy import OFF
from tests.rollout.conftest import NGRAM, VOCAB

if TYPE_CHECKING:
    from megatron_tlt.rollout.vllm_engine import VllmEngine

COUNT, TURN, TURNS = 6, 5, 4


def request_of(number: int, tokens: tuple[int, ...] = (), most: int = TURN) -> Request:
    prompt = tuple((7 * number + 3 * i) % (VOCAB - 4) + 4 for i in range(12))
    return Request(f"{number}#{len(tokens)}", prompt + tokens, SamplingSpec(0.0, max_tokens=most), 1, f"p{number}")


class Slow:
    """Continues each response after a while with what was said, ``TURNS`` times in all."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self.said: dict[int, tuple[int, ...]] = dict.fromkeys(range(COUNT), ())
        self._due: list[tuple[float, int]] = []
        self.waits = 0

    def finished(self, response: Response) -> None:
        number = int(response.request_id.partition("#")[0])
        self.said[number] += tuple(response.token_ids)
        if len(self.said[number]) < TURN * TURNS:
            self._due.append((time.monotonic() + self._wait_s * (number + 1), number))

    def take(self, wait: bool) -> list[Request] | None:
        self.waits += wait
        if all(len(said) == TURN * TURNS for said in self.said.values()):
            return None
        if wait:
            time.sleep(0.01)
        ready = [number for due, number in self._due if due <= time.monotonic()]
        self._due = [(due, number) for due, number in self._due if number not in ready]
        return [request_of(number, self.said[number]) for number in ready]


@pytest.mark.parametrize("strategy", [OFF, NGRAM], ids=["off", "ngram"])
@pytest.mark.parametrize("wait_s", [0.0, 0.05])
def test_turns_continue_the_response(wait_s: float, strategy: object, engine: VllmEngine) -> None:
    """Without an environment's words between them, greedy turns are one long greedy response."""
    engine.set_strategy(OFF)
    whole = engine.generate([request_of(number, most=TURN * TURNS) for number in range(COUNT)])
    engine.set_strategy(strategy)  # type: ignore[arg-type]
    turns = Slow(wait_s)
    first = engine.generate([request_of(number) for number in range(COUNT)], turns.finished, turns=turns)
    assert [tuple(response.token_ids) for response in first] == [turns.said[number][:TURN] for number in range(COUNT)]
    assert [turns.said[number] for number in range(COUNT)] == [tuple(response.token_ids) for response in whole]
    assert turns.waits > 0
    engine.set_strategy(OFF)
    again = engine.generate([request_of(0, most=TURN * TURNS)])
    assert list(again[0].token_ids) == list(whole[0].token_ids), "nothing is left of the turns"


def test_a_turn_that_does_not_fit_is_refused_and_empties_the_engine(engine: VllmEngine) -> None:
    class Endless:
        def take(self, wait: bool) -> list[Request] | None:
            return [request_of(9, most=10_000)] if wait else []

    engine.set_strategy(OFF)
    with pytest.raises(ConfigError, match=r"request 9#0: a prompt of 12 tokens with max_tokens 10000"):
        engine.generate([request_of(0)], turns=Endless())
    assert len(engine.generate([request_of(0)])[0].token_ids) == TURN

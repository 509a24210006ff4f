"""Responses of several turns: the policy's tokens and the environment's, one behind the other.

Tokens go in and out: what was sampled is never decoded and encoded again, so every token that is trained on is the
token that was sampled. The environment's tokens are left out of the loss.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from megatron_tlt.config.task import EnvironmentConfig
from megatron_tlt.data.tokenizer import Tokenizer, observation_text, response_text
from megatron_tlt.environments.pool import EnvironmentAnswer, EnvironmentPool
from megatron_tlt.rewards.types import Reward
from megatron_tlt.rollout.types import DraftStats, Request, Response, SamplingSpec
from megatron_tlt.tasks.types import Problem

_WAIT_S = 0.5
"""How long the engine waits at a time: in between it looks whether the run was asked to stop."""


@dataclass
class _Episode:
    request: Request
    problem: Problem
    environment: EnvironmentConfig
    number: int
    """In the pool."""
    tokens: array[int] = field(default_factory=lambda: array("i"))
    log_probs: array[float] = field(default_factory=lambda: array("f"))
    mask: list[bool] = field(default_factory=list)
    turns: int = 0
    draft: DraftStats = field(default_factory=DraftStats)
    last: Response | None = None
    """The newest turn, while its answer is awaited."""
    answer: EnvironmentAnswer | None = None
    """An answer that came before the turn ended: the start failed."""


def environment_of(problem: Problem) -> EnvironmentConfig | None:
    """The environment of a problem's task."""
    return None if problem.environment is None else EnvironmentConfig.model_validate(problem.environment)


def turn_sampling(whole: SamplingSpec, environment: EnvironmentConfig, used: int) -> SamplingSpec:
    """The sampling of a turn, of a response that is sampled as ``whole`` and has ``used`` tokens."""
    room = whole.max_tokens - used
    return replace(whole, max_tokens=min(room, environment.max_turn_tokens or room), stop=environment.stop)


def first_turn(request: Request, problem: Problem) -> Request:
    """A request for a whole response as the engine gets it."""
    environment = environment_of(problem)
    return (
        request if environment is None else replace(request, sampling=turn_sampling(request.sampling, environment, 0))
    )


def last_turn(response: Response) -> Sequence[int]:
    """The ids of the last turn of a response with all its turns."""
    others = [place for place, own in enumerate(response.loss_mask) if not own]
    return response.token_ids[others[-1] + 1 :] if others else response.token_ids


class Episodes:
    """The turns of one rollout; a source of the engine's requests (``rollout.interface.TurnSource``).

    Args:
        requests: for whole responses, each with its problem; those without an environment have one turn.
        tokenizer: converts turns and answers.
        pool: holds the environments.
        on_response: called with each whole response, the environment's reward if it gave one, and the last turn's text.

    Raises:
        ConfigError: a chat template cannot show an environment's answers.
    """

    def __init__(
        self,
        requests: Sequence[tuple[Request, Problem]],
        tokenizer: Tokenizer,
        pool: EnvironmentPool,
        on_response: Callable[[Response, Reward | None, str], None],
    ) -> None:
        self._tokenizer, self._pool, self._on_response = tokenizer, pool, on_response
        self._episodes: dict[str, _Episode] = {}
        self._names: dict[int, str] = {}
        self._next: list[Request] = []
        for request, problem in requests:
            environment = environment_of(problem)
            if environment is not None:
                self._shown("?", problem, environment, ())
                number = pool.start(problem, environment, request.seed)
                self._episodes[request.request_id] = _Episode(request, problem, environment, number)
                self._names[number] = request.request_id

    def finished(self, response: Response) -> None:
        """Takes a turn that the engine has finished."""
        name, _, _ = response.request_id.partition("#")
        episode = self._episodes.get(name)
        if episode is None:
            self._on_response(response, None, response_text(self._tokenizer, response.token_ids))
            return
        episode.turns += 1
        episode.tokens.extend(response.token_ids)
        episode.log_probs.extend(response.log_probs)
        episode.mask.extend([True] * len(response.token_ids))
        episode.draft = episode.draft + response.draft
        episode.last = response
        if response.finish_reason == "abort":
            self._end(name, episode, None)
        elif episode.answer is not None:
            self._end(name, episode, episode.answer.reward)
        else:
            self._pool.step(episode.number, response_text(self._tokenizer, response.token_ids))

    def take(self, wait: bool) -> list[Request] | None:
        """See ``TurnSource.take``.

        Raises:
            RunError: the environments' processes do not start.
        """
        if not self._episodes:
            return None
        for number, answer in self._pool.take(_WAIT_S if wait else 0.0):
            if number in self._names:
                self._answered(self._names[number], answer)
        found, self._next = self._next, []
        return found if found or self._episodes else None

    def close(self) -> None:
        """Ends all episodes, those of an interrupted rollout included."""
        self._pool.clear()

    def _answered(self, name: str, answer: EnvironmentAnswer) -> None:
        episode = self._episodes[name]
        last = episode.last
        if last is None:
            episode.answer = answer
            return
        room = episode.request.sampling.max_tokens - len(episode.tokens)
        over = answer.text is None or last.finish_reason == "length" or episode.turns == episode.environment.max_turns
        if not over and answer.text is not None:
            shown = self._shown(answer.text, episode.problem, episode.environment, last.token_ids)
            if len(shown) < room:
                episode.tokens.extend(shown)
                episode.log_probs.extend([0.0] * len(shown))
                episode.mask.extend([False] * len(shown))
                episode.last = None
                self._next.append(self._turn(episode))
                return
            episode.last = replace(last, finish_reason="length")
        self._end(name, episode, answer.reward)

    def _turn(self, episode: _Episode) -> Request:
        first = episode.request
        seed = hashlib.blake2b(f"{first.seed}/{episode.turns}".encode(), digest_size=8).digest()
        return replace(
            first,
            request_id=f"{first.request_id}#{episode.turns}",
            prompt_token_ids=(*first.prompt_token_ids, *episode.tokens),
            sampling=turn_sampling(first.sampling, episode.environment, len(episode.tokens)),
            seed=int.from_bytes(seed, "big") >> 1,
        )

    def _end(self, name: str, episode: _Episode, reward: Reward | None) -> None:
        last = episode.last
        assert last is not None
        del self._episodes[name], self._names[episode.number]
        self._pool.end(episode.number)
        whole = replace(
            last,
            request_id=name,
            prompt_token_ids=episode.request.prompt_token_ids,
            token_ids=episode.tokens,
            log_probs=episode.log_probs,
            draft=episode.draft,
            loss_mask=tuple(episode.mask),
            turns=episode.turns,
        )
        self._on_response(whole, reward, response_text(self._tokenizer, last.token_ids))

    def _shown(self, text: str, problem: Problem, environment: EnvironmentConfig, turn: Sequence[int]) -> list[int]:
        """The ids of an answer: a message of the chat, or lines of their own after a plain prompt."""
        chat = problem.metadata.get("messages") is not None
        shown = observation_text(self._tokenizer, text, turn, environment.role) if chat else f"\n{text}\n"
        return self._tokenizer.encode(shown)

"""Phases 1 and 2 of a step: engines decode their problems while verifiers judge finished responses."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch.distributed as dist

from megatron_tlt.data.rollout_batch import RolloutBatch
from megatron_tlt.data.routes import routes_of
from megatron_tlt.data.tokenizer import Tokenizer, encode_prompt, response_text
from megatron_tlt.environments.pool import EnvironmentPool
from megatron_tlt.errors import ConfigError, RunError
from megatron_tlt.observe.timeline import Timeline
from megatron_tlt.platform.collectives import all_gather_data, any_rank, failing_together
from megatron_tlt.platform.device import barrier, rank, world_size
from megatron_tlt.rewards.pool import RewardPool
from megatron_tlt.rewards.types import Reward
from megatron_tlt.rollout.engine_speculation import EngineSpeculation
from megatron_tlt.rollout.interface import RolloutEngine
from megatron_tlt.rollout.replay import append_recording
from megatron_tlt.rollout.stop import StopAgreement
from megatron_tlt.rollout.types import Request, Response, SamplingSpec
from megatron_tlt.speculation.strategy import StepRecord
from megatron_tlt.tasks.limit import allowed_prompts
from megatron_tlt.tasks.types import Problem
from megatron_tlt.trainer.carried import Carried, Continuations, Key
from megatron_tlt.trainer.dealing import Dealing
from megatron_tlt.trainer.engine_track import EngineTrack
from megatron_tlt.trainer.episodes import Episodes, first_turn, last_turn
from megatron_tlt.trainer.requests import request_seed
from megatron_tlt.trainer.responses import ScoredResponse, batch_of_responses, check_responses
from megatron_tlt.trainer.turns import EngineTurns


class StopRequested(Exception):
    """A stop was requested during decoding; the step's responses are dropped and decoded again after a resume."""


class Race(Protocol):
    """Responses of a rollout race, and those that lose are aborted (``trainer.tail_rounds``)."""

    def finished(self, response: Response) -> None:
        """A response ended or was aborted."""

    def stepped(self) -> None:
        """The engine made a step; aborts what has lost."""

    def ended(self) -> None:
        """The engine has ended all its responses."""

    def kept(self, own: Mapping[tuple[int, int], Response]) -> dict[tuple[int, int], Response]:
        """Those of this rank's responses that are returned; a collective."""
        ...


@dataclass(frozen=True)
class PhaseTimes:
    """Seconds until this rank's engine finished, then until the slowest one finished, then until the last reward."""

    rollout: float
    idle: float
    reward: float


Scored = tuple[list[ScoredResponse], RolloutBatch]
Answers = tuple[list[ScoredResponse], RolloutBatch, PhaseTimes]
WhileIdle = Callable[[Callable[[dist.ProcessGroup], Scored] | None], None]
"""Called by a rank whose engine is done, with a function that returns the responses of a group's engines, all of which
are done; None where responses are still chosen or dropped. The function is a collective of the group."""
StartRace = Callable[[RolloutEngine, Mapping[str, tuple[int, int]]], Race]


class ExperienceCollector:
    """Generates and scores responses on all engines; all ranks of the world call it together.

    Problems are assigned to engines round-robin or by speed; all samples of a problem share one engine's prefix cache.

    Args:
        engine: this rank's engine.
        tokenizer: converts between text and token ids.
        pool: verifies responses, on the first rank of each engine.
        environments: holds episodes, on the first rank of each engine; None: no task has an environment.
        max_prompt_tokens: longer prompts are refused.
        max_response_tokens: responses are truncated at this length.
        tensor_parallel_size: ranks per engine.
        dealing: assigns problems to engines; None: round-robin.
        speculation: drafts in the engine's steps; None: the drafter that the engine was built with.
        has_routes: the engines' responses have the experts of their tokens (``rollout.router_replay``).
        on_collected: called on every rank after scoring, with the problems, all responses and the batch of this rank's
            tokens.
        should_stop: polled after every engine step; True ends the rollout early.
        request_transform: maps each request, named ``problem-sample``, to the one that the engine receives; benchmarks
            use it to fix response lengths.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        tokenizer: Tokenizer,
        pool: RewardPool,
        *,
        max_prompt_tokens: int,
        max_response_tokens: int,
        tensor_parallel_size: int,
        timeline: Timeline,
        dealing: Dealing | None = None,
        environments: EnvironmentPool | None = None,
        speculation: EngineSpeculation | None = None,
        has_routes: bool = False,
        on_collected: Callable[[Sequence[Problem], Sequence[ScoredResponse], RolloutBatch], None] | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        request_transform: Callable[[Request], Request] = lambda request: request,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._pool = pool
        self._environments = environments
        self._max_prompt_tokens = max_prompt_tokens
        self._max_response_tokens = max_response_tokens
        self._tp = tensor_parallel_size
        self._dealing = dealing or Dealing(world_size() // tensor_parallel_size)
        self._timeline = timeline
        self._track = EngineTrack(timeline)
        self._speculation = speculation
        self._has_routes = has_routes
        self._on_collected = on_collected
        self._should_stop = should_stop
        self._request_transform = request_transform

    def collect(
        self,
        problems: Sequence[Problem],
        samples: int,
        sampling: SamplingSpec,
        seed_parts: Sequence[object],
        on_finished: Callable[[int], None] | None = None,
        while_idle: WhileIdle | None = None,
        recording: Path | None = None,
        race: StartRace | None = None,
        carried: Mapping[Key, Carried] | None = None,
    ) -> Answers:
        """Generates ``samples`` responses to each problem.

        ``while_idle`` is called after this rank's engine has finished; it ends soon after the last engine. The first
        rank of each engine appends its responses to a file of its own in the folder ``recording``, if any. ``race`` is
        called with the engine and the position of each request's problem and sample; it ends responses early and
        chooses which are returned. ``carried`` responses of earlier steps, by position and sample, are continued; the
        batch then has the version of each token.

        Returns:
            All responses of all engines, ordered by problem and sample, the same on every rank; their batch, in which
            the first rank of each engine holds the tokens and log-probs of its own responses; this rank's times.

        Raises:
            ConfigError: a prompt is longer than the limit.
            RunError: on every rank, when any rank's reward pool has failed.
            StopRequested: on every rank, when any rank was asked to stop before the last engine ended.
        """
        requests, keys = self._requests(problems, samples, sampling, seed_parts)
        masked = next((problem.source for problem in problems if problem.environment is not None), None)
        leads = rank() % self._tp == 0
        version = self._engine.versions.get("policy") or 0  # an engine that sleeps has none
        start = time.perf_counter()
        stopped = False
        responses: list[Response] = []
        stop = StopAgreement(self._should_stop, self._engine.tensor_parallel_group)
        racing = race(self._engine, keys) if race is not None else None
        continuations = Continuations(carried or {}, keys)
        requests, ended = continuations.begin(requests)

        whole: dict[str, Response] = {}
        given: dict[str, Reward] = {}

        def judge(response: Response, reward: Reward | None, text: str) -> None:
            whole[response.request_id] = response
            if reward is not None:
                given[response.request_id] = reward
            elif leads and response.finish_reason != "abort":
                problem = problems[keys[response.request_id][0]]
                # collect() below reports a failed pool on all ranks. An error raised here, on one rank, would leave
                # the other ranks blocked in a collective.
                with contextlib.suppress(RunError):
                    self._pool.submit(response.request_id, problem, text)
            if on_finished is not None:
                on_finished(1)

        def check_stop() -> None:
            if stop():
                raise StopRequested

        asked = [(request, problems[keys[request.request_id][0]]) for request in requests]
        episodes, turns = None, None
        if masked is not None and not self._engine.capabilities.whole_episodes:
            episodes = self._begin_episodes(asked, judge) if leads else None
            turns = EngineTurns(episodes, self._engine.tensor_parallel_group, self._speculation, check_stop)
            requests = [first_turn(request, problem) for request, problem in asked]

        def finished(response: Response) -> None:
            whole_response = continuations.join(response)
            if self._speculation is not None:
                self._speculation.finished(response, len(whole_response.token_ids), goes_on=carried is not None)
            if racing is not None:
                racing.finished(response)
            if episodes is not None:
                episodes.finished(response)
            elif turns is None:
                judge(whole_response, response.reward, response_text(self._tokenizer, last_turn(whole_response)))

        def stepped(record: StepRecord) -> None:
            self._track.add(record)
            check_stop()
            if racing is not None:
                racing.stepped()

        if self._speculation is not None:
            self._speculation.begin_rollout(requests, self._engine.versions.get("drafter"))
        with self._timeline.span("rollout", requests=len(requests)):
            self._track.begin_rollout()
            for response in ended:
                if racing is not None:
                    racing.finished(replace(response, token_ids=(), log_probs=()))
                judge(response, None, response_text(self._tokenizer, last_turn(response)))
            try:
                more = {} if turns is None else {"turns": turns}
                responses = self._engine.generate(requests, finished, stepped, self._speculation, **more)
                responses = [*map(continuations.join, responses), *ended]
                if racing is not None:
                    racing.ended()
            except StopRequested:
                stopped = True
            finally:
                self._track.flush()
                if episodes is not None:
                    episodes.close()
                if self._speculation is not None:
                    self._speculation.end_rollout([*requests, *(turns.requests if turns else ())])
        decoded = time.perf_counter()
        rewards: dict[Hashable, Reward] = {}

        def own_responses() -> dict[Key, Response]:
            """This rank's, by position and sample; none on all ranks of an engine but the first."""
            if not leads:
                return {}
            ended = responses if turns is None else [whole[request.request_id] for request in requests]
            return {keys[r.request_id]: r for r in ended}

        def judge_all(own: Mapping[Key, Response]) -> None:
            check_responses(own.values())
            rewards.update(self._pool.collect() | dict[Hashable, Reward](given))

        def answers(own: Mapping[Key, Response], group: dist.ProcessGroup | None = None) -> Scored:
            mine = [ScoredResponse.of(*key, r, rewards[r.request_id]) for key, r in own.items()]
            everyone = all_gather_data(mine, list[ScoredResponse], group)
            scored = sorted((s for part in everyone for s in part), key=lambda s: (s.problem, s.sample))
            marks = {"masked": masked is not None, "versioned": carried is not None}
            return scored, batch_of_responses(scored, own, version, **marks)

        def answers_of(group: dist.ProcessGroup) -> Scored:
            with failing_together(group):
                own = own_responses()
                judge_all(own)
            return answers(own, group)

        with self._timeline.span("idle"):
            if while_idle is not None:
                while_idle(answers_of if racing is None and not stopped else None)
            stopped = any_rank(stopped or self._should_stop())
            barrier()
        waited = time.perf_counter()
        with self._timeline.span("reward"), failing_together():
            own = own_responses() if not stopped else {}
            if racing is not None and not stopped:
                own = racing.kept(own)
            judge_all(own)
            if recording is not None and leads and not stopped:
                rewarded = [replace(one, reward=given.get(one.request_id)) for one in own.values()]
                append_recording(recording / f"rank_{rank():05d}.jsonl", requests, rewarded)
        if stopped:
            raise StopRequested
        judged = time.perf_counter()
        scored, batch = answers(own)
        if self._has_routes:
            held = [own[scored[i].problem, scored[i].sample] for i in batch.held]
            batch = batch.with_columns(routes_SF=routes_of(held))
        if self._on_collected is not None:
            self._on_collected(problems, scored, batch)
        return scored, batch, PhaseTimes(decoded - start, waited - decoded, judged - waited)

    def owns(self, position: int) -> bool:
        """Whether this rank's engine decodes the problem at this position of a round."""
        return self._dealing.engine_of(position) == rank() // self._tp

    def num_own(self, problems: int, samples: int) -> int:
        """Responses of this rank's engine, of ``samples`` to each of ``problems``."""
        return self._dealing.num_dealt(problems, rank() // self._tp) * samples

    def _requests(
        self, problems: Sequence[Problem], samples: int, sampling: SamplingSpec, seed_parts: Sequence[object]
    ) -> tuple[list[Request], dict[str, tuple[int, int]]]:
        requests: list[Request] = []
        keys: dict[str, tuple[int, int]] = {}
        for index, problem in enumerate(problems):
            prompt = tuple(encode_prompt(self._tokenizer, problem))
            if len(prompt) > self._max_prompt_tokens:
                raise ConfigError(
                    f"problem {problem.uid}: its prompt has {len(prompt)} tokens; "
                    f"{allowed_prompts(self._max_prompt_tokens)}"
                )
            if not self.owns(index):
                continue
            for sample in range(samples):
                name = f"{index}-{sample}"
                seed = request_seed(*seed_parts, problem.uid, index, sample)
                requests.append(self._request_transform(Request(name, prompt, sampling, seed, problem.uid, sample)))
                keys[name] = (index, sample)
        return requests, keys

    def _begin_episodes(
        self, asked: Sequence[tuple[Request, Problem]], judge: Callable[[Response, Reward | None, str], None]
    ) -> Episodes | None:
        if all(problem.environment is None for _, problem in asked):
            return None
        if self._environments is None:
            raise RunError("a task has an environment, but nothing here holds episodes")
        return Episodes(asked, self._tokenizer, self._environments, judge)

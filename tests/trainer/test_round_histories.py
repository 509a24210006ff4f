"""Runs of rounds that continue responses, with steps that stop and restarts from earlier checkpoints.

Scheduler, race, carried responses and their checkpoints are the product's, as ``Rounds.collect`` puts them together; an
engine that samples a token of each response in a step takes the place of vLLM.
"""

from __future__ import annotations

import copy
import random
from array import array
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from megatron_tlt.config.schedule import schedule_violations
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.config.tail import MAX_STALENESS, tail_violations
from megatron_tlt.rewards.types import Reward
from megatron_tlt.rollout.types import Request, Response, SamplingSpec
from megatron_tlt.tasks.rounds import TailState
from megatron_tlt.tasks.types import Problem
from megatron_tlt.trainer import tail_rounds
from megatron_tlt.trainer.carried import Carried, CarriedResponses, Continuations, Key, whole_versions
from megatron_tlt.trainer.experience import Answers, PhaseTimes, StartRace
from megatron_tlt.trainer.responses import ScoredResponse, batch_of_responses
from megatron_tlt.trainer.tail_rounds import Rounds, build_rounds

MOST, STEPS = 12, 8
"""Tokens of the longest response, and steps of a run."""


class AloneBoard:
    """The board of one engine: there is no other to hear of."""

    def tell(self, finishes: Mapping[int, int]) -> None:
        pass

    def read(self) -> dict[int, int]:
        return {}

    def clear(self) -> None:
        pass


class TokenEngine:
    """Requests that gain one token in a step, until they are aborted."""

    tensor_parallel_group = None

    def __init__(self) -> None:
        self.unfinished: dict[str, int] = {}
        self.aborted: list[str] = []

    def abort(self, name: str) -> None:
        self.aborted.append(name)


def sections(draw: random.Random) -> dict[str, Any]:
    kind = draw.choice(("partial", "one_step_off", "tail"))
    if kind == "one_step_off":
        return {"schedule": {"kind": kind}}
    eta = draw.choice((1.5, 2.0, 3.0))
    if kind == "partial":
        return {"schedule": {"kind": kind, "eta_prompts": eta, "max_staleness": draw.randint(1, 4)}}
    return {"tail": {"deferred": "continue", "eta_prompts": eta, "eta_responses": draw.choice((1.0, 1.5))}}


@dataclass(frozen=True)
class Checkpoint:
    carried: CarriedResponses
    state: TailState
    trained: tuple[int, ...]
    learned: Counter[Key]


class RoundsRun:
    """A run of one engine. A token's id and log-prob say which policy sampled it, at which place."""

    def __init__(self, draw: random.Random, folder: Path) -> None:
        self.draw, self.folder = draw, folder
        base = {"model": {"path": "m"}, "tasks": [{"name": "gcd"}], "trainer": {"prompts_per_step": 2}}
        algorithm = {"group_size": 2, "correction": {"weights": "token"}}
        self.config = TltConfig.model_validate({**base, "algorithm": algorithm, **sections(draw)})
        assert not [*schedule_violations(self.config), *tail_violations(self.config)]
        schedule = self.config.schedule
        self.bound = schedule.max_staleness if schedule is not None else MAX_STALENESS
        self.version, self.state = 0, TailState()
        self.trained: list[int] = []
        self.kept = defaultdict[int, set[int]](set)
        self.learned = Counter[Key]()
        self.dropped = False
        self.aborted: dict[Key, int] = {}
        self.checkpoints: list[Checkpoint] = []
        self.rounds = self.build()
        self.save()

    def build(self) -> Rounds:
        rounds = build_rounds(self.config, lambda at: True, lambda: self.version, self)
        assert rounds is not None and rounds.carried is not None
        return rounds

    def problem(self, index: int) -> Problem:
        return Problem(str(index), "s", "?", "1", "math")

    def end_round(self, problems: Sequence[Problem], ended: Mapping[Key, int], cut: Mapping[Key, int]) -> None:
        self.learned.update((int(problems[at].uid), sample) for at, sample in ended)
        held = self.rounds.carried
        assert held is not None
        waiting = {row.key: row.length for row in held.rows if row.finish_reason == "abort"}
        for (at, sample), tokens in self.aborted.items():
            key = int(problems[at].uid), sample
            assert ((at, sample) in cut) != (key in waiting), "an aborted response goes on, or is learned from"
            assert cut.get((at, sample), waiting.get(key)) == tokens

    def collect(
        self, problems: list[Problem], samples: int, race: StartRace | None, carried: Mapping[Key, Carried] | None
    ) -> Answers:
        engine, keys = TokenEngine(), {f"{at}-{n}": (at, n) for at in range(len(problems)) for n in range(samples)}
        racing = race(engine, keys) if race is not None else None  # type: ignore[arg-type]
        continuations = Continuations(carried or {}, keys)
        spec = SamplingSpec(temperature=1.0, max_tokens=MOST)
        asked = [Request(name, (1, int(problems[at].uid) + 2), spec, 0) for name, (at, _) in keys.items()]
        requests, before = continuations.begin(asked)
        whole = {one.request_id: one for one in before}
        if racing is not None:
            for one in before:
                racing.finished(replace(one, token_ids=(), log_probs=()))
        running = {request.request_id: request for request in requests}
        engine.unfinished = dict.fromkeys(running, 0)
        while running:
            for name in running:
                engine.unfinished[name] += 1
            ends = [name for name in running if self.has_ended(problems, keys[name], running[name], engine)]
            for reason, names in (("stop", ends), ("abort", None)):
                if names is None:
                    if racing is not None:
                        racing.stepped()
                    names, engine.aborted = engine.aborted, []
                for name in names:
                    one = self.response(running.pop(name), engine.unfinished.pop(name), reason)
                    whole[name] = continuations.join(one)
                    if racing is not None:
                        racing.finished(one)
        if self.draw.random() < 0.1:
            raise KeyboardInterrupt
        own = {keys[name]: one for name, one in whole.items()}
        self.aborted = {
            key: len(one.token_ids) for key, one in own.items() if one.finish_reason == "abort" and len(one.token_ids)
        }
        if racing is not None:
            racing.ended()
            own = racing.kept(own)
        scored = [ScoredResponse.of(*key, one, Reward(1.0, True)) for key, one in sorted(own.items())]
        for key, one in own.items():
            self.check(one)
            self.kept[int(problems[key[0]].uid)].add(key[1])
        news = [one for one in scored if one.continued < one.length]
        self.learned.update((int(problems[one.problem].uid), one.sample) for one in news)
        batch = batch_of_responses(scored, own, self.version, masked=False, versioned=True)
        return scored, batch, PhaseTimes(0.0, 0.0, 0.0)

    def has_ended(self, problems: list[Problem], key: Key, request: Request, engine: TokenEngine) -> bool:
        length = random.Random(f"{problems[key[0]].uid}/{key[1]}").choice((1, 2, 3, MOST))
        return request.begun + engine.unfinished[request.request_id] == length

    def response(self, request: Request, count: int, reason: str) -> Response:
        tokens = array("i", [100 * self.version + request.begun + at for at in range(count)])
        probs = array("f", [-self.version / 8] * count)
        return Response(request.request_id, request.prompt_token_ids, tokens, probs, reason, 0.0)

    def check(self, one: Response) -> None:
        versions = [version for version, count in whole_versions(one, self.version) for _ in range(count)]
        assert self.version - min(versions) <= self.bound
        assert list(one.token_ids) == [100 * version + at for at, version in enumerate(versions)]
        assert list(one.log_probs) == [-version / 8 for version in versions]
        assert one.finish_reason == "stop"

    def step(self) -> None:
        try:
            one = self.rounds.collect(self.state, self.problem, self.collect)
        except KeyboardInterrupt:
            if self.draw.random() < 0.5:  # else the step is repeated by the same process
                self.restart()
            return
        assert self.rounds.carried is not None
        self.dropped |= self.rounds.carried.dropped_tokens > 0
        self.trained += [int(problem.uid) for problem in one.collected.problems]
        self.state = one.state
        self.version += 1
        self.save()

    def save(self) -> None:
        carried = copy.copy(self.rounds.carried)  # written once a restart needs it
        assert carried is not None
        kept = self.checkpoints[: self.version]
        self.checkpoints = [*kept, Checkpoint(carried, self.state, tuple(self.trained), Counter(self.learned))]

    def restart(self) -> None:
        """Goes on from one of the newest checkpoints, several steps back or none."""
        self.version = self.draw.randint(max(0, self.version - 3), self.version)
        one = self.checkpoints[self.version]
        self.state, self.trained, self.learned = one.state, list(one.trained), Counter(one.learned)
        self.rounds = self.build()
        assert self.rounds.carried is not None
        one.carried.save(self.folder)
        self.rounds.carried.load([self.folder])


@pytest.mark.parametrize("count", [100, pytest.param(2000, marks=pytest.mark.slow)])
def test_over_random_histories_no_token_is_too_old_and_nothing_is_lost(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail_rounds, "FinishBoard", AloneBoard)
    for number in range(count):
        run = RoundsRun(random.Random(number), tmp_path)
        for _ in range(STEPS):
            run.step()
        assert len(set(run.trained)) == len(run.trained), "no problem is used twice"
        waiting = set(run.state.deferred)
        assert waiting | set(run.trained) == set(range(run.state.next_problem)), "none is lost"
        assert not waiting & set(run.trained)
        if not run.dropped:  # what is generated anew ends anew
            assert all(run.learned[problem, sample] == 1 for problem in run.trained for sample in run.kept[problem])

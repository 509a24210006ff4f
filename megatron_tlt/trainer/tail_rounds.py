"""Rounds of tail batching on real engines: what cannot be kept is aborted, and the step gets what won."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_tlt.config.schema import TltConfig
from megatron_tlt.config.tail import MAX_STALENESS
from megatron_tlt.platform.collectives import all_gather_data
from megatron_tlt.platform.device import barrier, rank
from megatron_tlt.platform.rank_group import WholeGroup, broadcast_plain
from megatron_tlt.rollout.interface import RolloutEngine
from megatron_tlt.rollout.types import Response
from megatron_tlt.tasks.rounds import AheadScheduler, Key, TailRound, TailScheduler, TailState, TokenRace, select
from megatron_tlt.tasks.types import Problem
from megatron_tlt.trainer.carried import Carried, CarriedResponses, new_tokens
from megatron_tlt.trainer.dynamic_sampling import Collected
from megatron_tlt.trainer.experience import Answers, StartRace
from megatron_tlt.trainer.responses import ScoredResponse

POLL_S = 0.05
"""How often an engine asks what finished in the others; a late answer costs decoding, not correctness."""
AGREE_STEPS = 8
"""Engine steps between two agreements of the ranks of one engine."""


class FinishBoard:
    """Which problems of a rollout finished at how many tokens, of all engines, in the process group's store.

    All ranks create one for the same rollout; its key in the store is of no other.
    """

    _numbers = itertools.count()

    def __init__(self) -> None:
        self._store: Any = dist.distributed_c10d._get_default_store()  # its stubs lack ``append``
        self._name = f"tail/{next(self._numbers)}"
        self._read = time.monotonic()

    def tell(self, finishes: Mapping[int, int]) -> None:
        """Adds problems, by position."""
        if finishes:
            self._store.append(self._name, "".join(f"{at}:{tokens} " for at, tokens in finishes.items()))

    def read(self) -> dict[int, int]:
        """All that any engine has told, at most every ``POLL_S`` seconds; otherwise nothing."""
        now = time.monotonic()
        if now - self._read < POLL_S or not self._store.check([self._name]):
            return {}
        self._read = now
        found: dict[int, int] = {}
        for entry in self._store.get(self._name).decode().split():
            at, _, tokens = entry.partition(":")
            found[int(at)] = min(int(tokens), found.get(int(at), int(tokens)))
        return found

    def clear(self) -> None:
        """Forgets the rollout, after all engines have read it."""
        self._store.delete_key(self._name)


@dataclass(frozen=True)
class RoundCosts:
    """Responses of a round and their tokens: all, aborted ones with what they had, and those that are kept.

    ``decoded`` and ``kept_decoded`` are tokens of this round, ``tokens`` and ``kept_tokens`` of earlier ones too.
    """

    asked: int
    decoded: int
    tokens: int
    kept: int
    kept_decoded: int
    kept_tokens: int

    @staticmethod
    def of_all(scored: Sequence[ScoredResponse]) -> RoundCosts:
        """Of a round whose responses are all kept."""
        tokens = sum(one.length for one in scored)
        decoded = tokens - sum(one.continued for one in scored)
        return RoundCosts(len(scored), decoded, tokens, len(scored), decoded, tokens)

    def metrics(self) -> dict[str, float]:
        """The share of tokens that the step does not train on, and how much shorter kept responses are than all."""
        wasted = 1 - self.kept_decoded / self.decoded if self.decoded else 0.0
        return {"tail/wasted": wasted, "tail/kept_over_all": self.kept_tokens / self.tokens * self.asked / self.kept}


class RacingRollout:
    """One engine's part of a short round; see :class:`TokenRace`. All ranks of the engine make the same calls.

    Args:
        asked: the round.
        engine: this rank's; aborts requests.
        keys: position and sample by request id.
    """

    def __init__(self, asked: TailRound, engine: RolloutEngine, keys: Mapping[str, Key]) -> None:
        self._asked, self._engine, self._keys = asked, engine, keys
        self._names = {key: name for name, key in keys.items()}
        self._race = TokenRace(asked.samples, asked.keep_problems, asked.keep_samples, asked.must)
        self._group = engine.tensor_parallel_group
        self._leads = self._group is None or dist.get_rank(self._group) == 0
        self._board = FinishBoard()
        self._news: dict[int, int] = {}
        self._began = time.monotonic()
        self._measures: dict[Key, int] = {}  # tokens or milliseconds of responses that ended
        self._steps = 0
        self._decoded = 0
        self.costs = RoundCosts(0, 0, 0, 0, 0, 0)
        """Of all engines; after ``kept``."""
        self.left: dict[Key, Response] = {}
        """This rank's responses to problems that did not win, as many of each as a long round has; after ``kept``."""
        self.left_ended: dict[Key, int] = {}
        """Tokens of all ranks' such responses that ended in this round; after ``kept``."""
        self.cut: dict[Key, int] = {}
        """Tokens of this rank's aborted responses that are not ``left``; after ``kept``."""
        self.lost = 0
        """Tokens of all engines that neither the step nor ``left`` has; after ``kept``."""

    def finished(self, response: Response) -> None:
        """Accounts for a response that ended or was aborted, with the tokens that this rollout decoded."""
        self._decoded += len(response.token_ids)
        if response.finish_reason == "abort":
            return
        key = self._keys[response.request_id]
        self._measures[key] = self._milliseconds() if self._asked.by_time else len(response.token_ids)
        if self._race.finished(key, self._measures[key]):
            self._news[key[0]] = self._race.finishes[key[0]]

    def _milliseconds(self) -> int:
        return round(1e3 * (time.monotonic() - self._began))

    def stepped(self) -> None:
        """Aborts what cannot be kept any more; after an engine step."""
        self._exchange()
        unfinished = {self._keys[name]: tokens for name, tokens in self._engine.unfinished.items()}
        if self._asked.by_time:
            unfinished = dict.fromkeys(unfinished, self._milliseconds())
        for key in self._race.lost(unfinished):
            self._engine.abort(self._names[key])

    def ended(self) -> None:
        """Tells the others what finished in the engine's last step."""
        if self._leads:
            self._board.tell(self._news)
        self._news = {}

    def _exchange(self) -> None:
        told: dict[int, int] = {}
        if self._leads:
            self._board.tell(self._news)
            told = self._board.read() if self._group is None else {}
        self._news = {}
        self._steps += 1
        if self._group is not None and self._steps % AGREE_STEPS == 0:
            told = self._board.read() if self._leads else {}
            source = dist.get_global_rank(self._group, 0)
            told = broadcast_plain(WholeGroup(self._group), told, dict[int, int], source, torch.device("cpu"))
        self._race.learn(told)

    def kept(self, own: Mapping[Key, Response]) -> dict[Key, Response]:
        """Those of this rank's responses that the step trains on; a collective.

        Args:
            own: this rank's responses, by position and sample; none on all ranks of an engine but the first.
        """
        ended = [(key, one) for key, one in own.items() if one.finish_reason != "abort"]
        mine = [(*key, self._measures[key], new_tokens(one), len(one.token_ids)) for key, one in ended]
        decoded = self._decoded if self._leads else 0
        tokens = decoded + sum(len(one.token_ids) - new_tokens(one) for one in own.values())
        everyone = all_gather_data((mine, decoded, tokens), tuple[list[tuple[int, int, int, int, int]], int, int])
        rows = {(at, sample): counts for part, *_ in everyone for at, sample, *counts in part}
        chosen = select(self._asked, {key: measure for key, (measure, *_) in rows.items()})
        size = len(self._asked.problems) * self._asked.samples
        kept = [sum(part) for part in zip(*(rows[key][1:] for key in chosen), strict=True)]
        asked = [sum(part) for part in zip(*(counts for _, *counts in everyone), strict=True)]
        self.costs = RoundCosts(size, asked[0], asked[1], len(chosen), kept[0], kept[1])
        barrier()
        if rank() == 0:
            self._board.clear()
        winners, samples = {at for at, _ in chosen}, self._asked.keep_samples
        left = {key for key in [*rows, *own] if key[0] not in winners and key[1] < samples}
        self.left = {key: one for key, one in own.items() if key in left}
        self.left_ended = {key: length for key, (_, new, length) in sorted(rows.items()) if key in left and new}
        self.cut = {
            key: len(one.token_ids) for key, one in own.items() if one.finish_reason == "abort" and key not in left
        }
        trained = {key: own[key] for key in chosen if key in own}
        lost = sum(len(one.token_ids) for key, one in own.items() if key not in trained and key not in self.left)
        self.lost = sum(all_gather_data(lost, int))
        return trained


class RoundLengths(Protocol):
    """Learns lengths from a round whose responses a later one continues."""

    def end_round(self, problems: Sequence[Problem], ended: Mapping[Key, int], cut: Mapping[Key, int]) -> None:
        """Learns from responses that the step does not train on, by position and sample.

        Args:
            problems: of the round.
            ended: tokens of those of all engines that ended in this round, and that a later step trains on.
            cut: tokens of those of this engine that were aborted, and that nothing continues.
        """


Collect = Callable[[list[Problem], int, StartRace | None, Mapping[Key, Carried] | None], Answers]
"""Responses to problems: so many to each, or those that a race keeps, or continued ones; numbered by position."""


@dataclass(frozen=True)
class CollectedRound:
    """A round's responses, what is deferred after it, and its metrics."""

    collected: Collected
    state: TailState
    metrics: dict[str, float]


class Continued:
    """What rounds leave and continue on this rank.

    Args:
        carried: the responses of all ranks.
        owns: whether this rank's engine decodes the problem at a position of a round.
        version: of the engine's policy.
    """

    def __init__(self, carried: CarriedResponses, owns: Callable[[int], bool], version: Callable[[], int]) -> None:
        self._carried, self._owns, self._engine_version = carried, owns, version
        self._version = 0

    def begin(self) -> set[int]:
        """Begins a round; the problems that no later step can continue, the same on all ranks."""
        self._version = self._engine_version()  # after the rollout the engine may sleep, and has none
        return self._carried.due(self._version)

    def take(self, asked: TailRound) -> dict[Key, Carried]:
        """What this rank's engine continues, by position and sample; a collective."""
        positions = {problem: at for at, problem in enumerate(asked.problems)}
        wanted = [problem for problem, at in positions.items() if self._owns(at)]
        found = self._carried.take(asked.problems, wanted, self._version)
        return {(positions[problem], sample): one for (problem, sample), one in found.items() if sample < asked.samples}

    def add(self, asked: TailRound, left: Mapping[Key, Response]) -> None:
        """Carries what a round left; a collective."""
        self._carried.add({(asked.problems[at], sample): one for (at, sample), one in left.items()}, self._version)

    def metrics(self, scored: Sequence[ScoredResponse], decoded: int, lost: int) -> dict[str, float]:
        """Share of a step's tokens that earlier policies sampled, the age of the oldest in steps, and tokens that were
        too old or are ``lost`` to later steps over those ``decoded`` in the round."""
        oldest = min((one.versions[0][0] for one in scored if one.versions), default=self._version)
        tokens = sum(one.length for one in scored)
        return {
            "tail/continued": sum(one.continued for one in scored) / tokens,
            "tail/staleness": float(self._version - oldest),
            "tail/wasted": (self._carried.dropped_tokens + lost) / max(decoded, 1),
        }


class Rounds:
    """Which problems and responses steps train on: tail batching, or bounded asynchrony.

    Args:
        scheduler: chooses the problems.
        carried: responses that rounds leave and continue, a part of the checkpoint; None: they are dropped.
        owns: whether this rank's engine decodes the problem at a position of a round.
        version: of the engine's policy.
        lengths: learns from what rounds leave, where it is carried; None: nothing does.
    """

    def __init__(
        self,
        scheduler: TailScheduler | AheadScheduler,
        carried: CarriedResponses | None,
        owns: Callable[[int], bool],
        version: Callable[[], int],
        lengths: RoundLengths | None = None,
    ) -> None:
        self._scheduler = scheduler
        self.carried = carried
        self._continued = Continued(carried, owns, version) if carried is not None else None
        self._lengths = lengths

    def size(self, state: TailState) -> tuple[int, int]:
        """Problems of the next round, and responses to each."""
        return self._scheduler.round(state).size

    def collect(self, state: TailState, problem: Callable[[int], Problem], collect: Collect) -> CollectedRound:
        """The responses that a step trains on; ``problem`` gives the training problem of an index."""
        with self.carried.unless_interrupted() if self.carried is not None else nullcontext():
            return _collect_round(self._scheduler, state, problem, collect, self._continued, self._lengths)


def build_rounds(
    config: TltConfig, owns: Callable[[int], bool], version: Callable[[], int], lengths: RoundLengths | None = None
) -> Rounds | None:
    """The rounds of the sections ``tail`` or ``schedule``; None: a step waits for all that it began."""
    sizes, tail = (config.trainer.prompts_per_step, config.algorithm.group_size), config.tail
    if config.schedule is not None:
        carried = CarriedResponses(config.schedule.max_staleness)
        return Rounds(AheadScheduler(config.schedule, *sizes), carried, owns, version, lengths)
    if tail is None:
        return None
    kept = CarriedResponses(tail.max_staleness or MAX_STALENESS) if tail.deferred == "continue" else None
    return Rounds(TailScheduler(tail, *sizes), kept, owns, version, lengths)


def _collect_round(
    scheduler: TailScheduler | AheadScheduler,
    state: TailState,
    problem: Callable[[int], Problem],
    collect: Collect,
    continued: Continued | None,
    lengths: RoundLengths | None,
) -> CollectedRound:
    asked = scheduler.round(state, continued.begin() if continued is not None else ())
    problems = [problem(index) for index in asked.problems]
    races: list[RacingRollout] = []

    def race(engine: RolloutEngine, keys: Mapping[str, Key]) -> RacingRollout:
        races.append(RacingRollout(asked, engine, keys))
        return races[0]

    taken = continued.take(asked) if continued is not None else None
    scored, batch, times = collect(problems, asked.samples, None if asked.is_long else race, taken)
    costs = races[0].costs if races else RoundCosts.of_all(scored)
    if continued is not None and races:
        continued.add(asked, races[0].left)
        if lengths is not None:
            lengths.end_round(problems, races[0].left_ended, races[0].cut)
    kept = sorted({one.problem for one in scored})
    number = {at: i for i, at in enumerate(kept)}
    after = scheduler.after(state, asked, kept)
    return CollectedRound(
        Collected(
            [problems[at] for at in kept],
            [one.of_problem(number[one.problem]) for one in scored],
            batch,
            times,
            generations=1,
            drawn=after.next_problem - state.next_problem,
            tokens=costs.decoded,
        ),
        after,
        {
            "tail/long_round": float(asked.is_long),
            "tail/deferred": float(len(after.deferred)),
            **costs.metrics(),
            **(
                continued.metrics(scored, costs.decoded, races[0].lost if races else 0) if continued is not None else {}
            ),
        },
    )

"""Rounds of tail batching on real engines: what cannot be kept is aborted, and the step gets what won."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_tlt.platform.collectives import all_gather_data
from megatron_tlt.platform.device import barrier, rank
from megatron_tlt.platform.rank_group import WholeGroup, broadcast_plain
from megatron_tlt.rollout.interface import RolloutEngine
from megatron_tlt.rollout.types import Response
from megatron_tlt.tasks.types import Problem
from megatron_tlt.trainer.dynamic_sampling import Collected
from megatron_tlt.trainer.experience import Answers, StartRace
from megatron_tlt.trainer.tail import Key, TailRound, TailScheduler, TailState, TokenRace, select

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
    """Responses of a round and their tokens: all, aborted ones with what they had, and those that are kept."""

    asked: int
    decoded: int
    kept: int
    kept_tokens: int

    def metrics(self) -> dict[str, float]:
        """The share of tokens that no step trains on, and how much shorter kept responses are than all."""
        share = self.kept_tokens / self.decoded
        return {"tail/wasted": 1 - share, "tail/kept_over_all": share * self.asked / self.kept}


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
        self._race = TokenRace(asked.samples, asked.keep_problems, asked.keep_samples)
        self._group = engine.tensor_parallel_group
        self._leads = self._group is None or dist.get_rank(self._group) == 0
        self._board = FinishBoard()
        self._news: dict[int, int] = {}
        self._steps = 0
        self._decoded = 0
        self.costs = RoundCosts(0, 0, 0, 0)
        """Of all engines; after ``kept``."""

    def finished(self, response: Response) -> None:
        """Accounts for a response that ended or was aborted."""
        self._decoded += len(response.token_ids)
        key = self._keys[response.request_id]
        if response.finish_reason != "abort" and self._race.finished(key, len(response.token_ids)):
            self._news[key[0]] = self._race.finishes[key[0]]

    def stepped(self) -> None:
        """Aborts what cannot be kept any more; after an engine step."""
        self._exchange()
        unfinished = {self._keys[name]: tokens for name, tokens in self._engine.unfinished.items()}
        for key in self._race.lost(unfinished):
            self._engine.abort(self._names[key])

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
        mine = [(*key, len(one.token_ids)) for key, one in own.items() if one.finish_reason != "abort"]
        decoded = self._decoded if self._leads else 0
        everyone = all_gather_data((mine, decoded), tuple[list[tuple[int, int, int]], int])
        lengths = {(at, sample): tokens for rows, _ in everyone for at, sample, tokens in rows}
        chosen = select(self._asked, lengths)
        size = len(self._asked.problems) * self._asked.samples
        tokens = sum(lengths[key] for key in chosen)
        self.costs = RoundCosts(size, sum(count for _, count in everyone), len(chosen), tokens)
        barrier()
        if rank() == 0:
            self._board.clear()
        return {key: own[key] for key in chosen if key in own}


Collect = Callable[[list[Problem], int, StartRace | None], Answers]
"""Responses to problems: so many to each, or those that a race keeps; numbered by position in the round."""


@dataclass(frozen=True)
class CollectedRound:
    """A round's responses, what is deferred after it, and its metrics."""

    collected: Collected
    state: TailState
    metrics: dict[str, float]


def collect_round(
    scheduler: TailScheduler, state: TailState, problem: Callable[[int], Problem], collect: Collect
) -> CollectedRound:
    """The responses that a step trains on; ``problem`` gives the training problem of an index."""
    asked = scheduler.round(state)
    problems = [problem(index) for index in asked.problems]
    races: list[RacingRollout] = []

    def race(engine: RolloutEngine, keys: Mapping[str, Key]) -> RacingRollout:
        races.append(RacingRollout(asked, engine, keys))
        return races[0]

    scored, batch, times = collect(problems, asked.samples, None if asked.is_long else race)
    tokens = sum(one.length for one in scored)
    costs = races[0].costs if races else RoundCosts(len(scored), tokens, len(scored), tokens)
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
        },
    )

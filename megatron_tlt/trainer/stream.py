"""The stream trainer: replicas whose engines are done train on their responses while other engines decode (RollPacker).

Its unit is the smallest set of ranks that holds whole data-parallel replicas of the policy and whole engines. A unit
whose engines are done scores its responses and accumulates their gradient, one part of them after another,
until the rollout is over. The update then trains on the rest, shared between all replicas.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_tlt.actor.policy import Policy
from megatron_tlt.algorithms.losses import Loss
from megatron_tlt.config.rounding import times_at_least
from megatron_tlt.config.stream import StreamConfig
from megatron_tlt.data.exchange import redistribute
from megatron_tlt.data.packing import balance
from megatron_tlt.data.rollout_batch import RolloutBatch
from megatron_tlt.errors import ConfigError, RunError
from megatron_tlt.observe.timeline import Timeline
from megatron_tlt.planning.saturation import MOST_ACCEPTANCES
from megatron_tlt.platform.collectives import all_gather_data
from megatron_tlt.platform.device import collective_timeout_s, rank, world_size
from megatron_tlt.platform.rank_group import WholeGroup, broadcast_plain
from megatron_tlt.trainer.bubble import Bubble, RolloutHistory
from megatron_tlt.trainer.experience import Scored
from megatron_tlt.trainer.responses import ScoredResponse
from megatron_tlt.trainer.scoring import BatchScorer
from megatron_tlt.trainer.streamed import Streamed

_POLL_S = 0.02


def units_of(replicas: Sequence[int], engine_size: int) -> list[list[int]]:
    """The smallest sets of ranks that hold whole replicas and whole engines, each ascending; pure.

    ``replicas`` has the data-parallel rank of every rank; ``engine_size`` consecutive ranks are an engine.
    """
    unit_of = {at: frozenset([at]) for at in range(len(replicas))}
    for at, replica in enumerate(replicas):
        first = min(other for other, found in enumerate(replicas) if found == replica)
        for partner in (first, at // engine_size * engine_size):
            merged = unit_of[at] | unit_of[partner]
            unit_of |= dict.fromkeys(merged, merged)
    return sorted(sorted(unit) for unit in set(unit_of.values()))


def parts_of(samples: Sequence[int], part: float) -> list[list[int]]:
    """``samples`` in parts of which each has that share of them, rounded up; pure."""
    size = max(1, times_at_least(part, len(samples)))
    return [list(samples[at : at + size]) for at in range(0, len(samples), size)]


class RolloutArrivals:
    """Which ranks are done with a rollout; all ranks create one for the same rollout.

    ``store`` is shared by all ranks; None: the process group's.
    """

    _numbers = itertools.count()

    def __init__(self, store: dist.Store | None = None) -> None:
        self._store: Any = dist.distributed_c10d._get_default_store() if store is None else store
        self._name = f"stream/{next(self._numbers)}"

    def arrive(self, place: str) -> None:
        """This rank is at ``place``; once for each."""
        self._store.add(f"{self._name}/{place}", 1)

    def count(self, place: str) -> int:
        """How many are or were there."""
        return int(self._store.add(f"{self._name}/{place}", 0))

    def wait(self, place: str, ranks: int) -> None:
        """Returns when so many are there; the limit of the phase ends a wait for a rank that never comes."""
        while self.count(place) < ranks:
            time.sleep(_POLL_S)

    def forget(self, place: str) -> None:
        """Removes the count of ``place``, which no rank asks for any more."""
        self._store.delete_key(f"{self._name}/{place}")


class StreamTrainer:
    """The stream trainer of one rank; all ranks create one.

    Args:
        config: the ``stream`` section.
        policy: accumulates the gradient.
        loss: of the update.
        scorer: gives the loss its columns.
        temperature: of the log-probs.
        engine_size: consecutive ranks of an engine.
        take_device: moves the engine and the drafter off the device, and the policy onto it.
        least_drafter_steps: ``spot.min_steps``.

    Raises:
        ConfigError: all ranks are one unit, so that none is ever done before another.
    """

    def __init__(
        self,
        config: StreamConfig,
        policy: Policy,
        loss: Loss,
        scorer: BatchScorer,
        timeline: Timeline,
        *,
        temperature: float,
        engine_size: int,
        take_device: Callable[[], None],
        least_drafter_steps: int = 0,
    ) -> None:
        self._config, self._policy, self._loss, self._scorer = config, policy, loss, scorer
        self._timeline, self._temperature, self._take_device = timeline, temperature, take_device
        self._least_steps = least_drafter_steps
        self._replicas = all_gather_data(policy.replica, int)
        units = units_of(self._replicas, engine_size)
        if len(units) == 1:
            raise ConfigError(
                f"stream: found a section; engines of {engine_size} ranks and replicas of "
                f"{self._replicas.count(0)} leave no rank idle before another; allowed: null, or smaller ones"
            )
        scorer.prepare_parts()
        # of gloo also on GPUs: what travels lies on the host
        limit = timedelta(seconds=collective_timeout_s())
        groups = [(unit, dist.new_group(unit, timeout=limit, backend="gloo")) for unit in units]
        self._unit, self._group = next((unit, group) for unit, group in groups if rank() in unit)
        self._history, self._part_s, self._load_s = RolloutHistory(), 0.0, 0.0
        self._acceptances: deque[float] = deque(maxlen=MOST_ACCEPTANCES)
        self._acceptance: float | None = None
        self.streamed = Streamed()
        """What this rank has accumulated in the newest rollout."""
        self._began, self._busy_s = 0.0, 0.0
        self._arrivals = RolloutArrivals()

    def begin(self) -> None:
        """A rollout begins; all ranks call it together."""
        self.streamed, self._busy_s = Streamed(), 0.0
        self._arrivals, self._began = RolloutArrivals(), time.perf_counter()

    def engine_ended(self) -> None:
        """This rank's engine is done; the timeline gets what is expected of its bubble."""
        self._arrivals.arrive("end")
        bubble = self.bubble()
        self._timeline.counter("bubble for the first part (s)", bubble.first_part_s)
        if bubble.remaining_s is not None:
            self._timeline.counter("bubble expected (s)", bubble.remaining_s)

    def bubble(self, drafter_steps: int = 0, may_train: bool = False) -> Bubble:
        """This rank's bubble now; ``may_train``: the drafter is trained here, or may still be."""
        return Bubble(
            self._history.remaining(time.perf_counter() - self._began),
            self._load_s + self._part_s,
            may_train,
            drafter_steps,
            self._least_steps,
            self._acceptance,
            max(self._acceptances, default=None),
        )

    def run(self, answers: Callable[[dist.ProcessGroup], Scored] | None) -> None:
        """Accumulates this unit's gradient until it is whole or the rollout is over, if all of its ranks may.

        ``answers``: the unit's responses, as :data:`WhileIdle` gives them; None where this rank has another use for its
        bubble, or none.
        """
        self._arrivals.arrive(f"unit {self._unit[0]}")
        self._arrivals.wait(f"unit {self._unit[0]}", len(self._unit))
        willing = all_gather_data(answers is not None, bool, self._group)
        if answers is None or not all(willing) or not self._agree():
            return
        began = time.perf_counter()
        with self._timeline.span("stream", "update", remaining_s=self._history.remaining(began - self._began)):
            try:
                scored, batch = answers(self._group)
                advantages = self._scorer.advantages(scored)
            except RunError:
                return  # the rollout's end reports it on every rank
            shares = self._shares(scored)
            own = shares[self._replicas[rank()]]
            batch = redistribute(batch, own, group=self._group)
            self._take_device()
            self._load_s = time.perf_counter() - began
            parts = {replica: parts_of(share, self._config.part) for replica, share in shares.items()}
            for number in range(max(len(found) for found in parts.values())):
                if number and not self._agree():
                    break
                started = time.perf_counter()
                for part in parts[self._replicas[rank()]][number : number + 1]:
                    self._accumulate(part, scored, batch, advantages)
                self._part_s = time.perf_counter() - started
        self._busy_s = time.perf_counter() - began

    def _shares(self, scored: Sequence[ScoredResponse]) -> dict[int, list[int]]:
        """The responses of each of the unit's replicas, by tokens and speed."""
        replicas = sorted({self._replicas[at] for at in self._unit})
        speeds = [self._policy.speeds[one] for one in replicas] if self._policy.speeds is not None else None
        shares = balance([float(one.prompt_length + one.length) for one in scored], len(replicas), speeds)
        return dict(zip(replicas, map(sorted, shares), strict=True))

    def _agree(self) -> bool:
        """Whether the unit goes on; its first rank decides for all."""
        goes_on = rank() == self._unit[0] and self._arrivals.count("end") < world_size()
        found: bool = broadcast_plain(WholeGroup(self._group), goes_on, bool, self._unit[0], torch.device("cpu"))
        return found

    def _accumulate(
        self, places: Sequence[int], scored: Sequence[ScoredResponse], batch: RolloutBatch, advantages: Sequence[float]
    ) -> None:
        chosen, own = [scored[i] for i in places], [advantages[i] for i in places]
        told, self._policy.on_forward = self._policy.on_forward, lambda samples: None  # not what the phase counts
        try:
            part, (old, states) = self._scorer.score_part(chosen, batch.select(places), own)
            self._policy.accumulate(part, self._loss, self._temperature)
        finally:
            self._policy.on_forward = told
        keys = [(one.problem, one.sample) for one in chosen]
        self.streamed.add(keys, own, old, states, [one.length for one in chosen])

    def end_rollout(self, seconds: float | None, acceptance: float | None) -> dict[str, float]:
        """The rollout is over; a collective over the world. Returns its metrics.

        Args:
            seconds: until the last engine was done; None where responses raced, which says nothing of others.
            acceptance: of the trained drafter's drafts, in tokens per verification; None if none were made.
        """
        if seconds is not None:
            self._history.add(seconds)
        self._acceptance = acceptance
        if acceptance is not None:
            self._acceptances.append(acceptance)
        busy = all_gather_data(self._busy_s, float)  # after this no rank asks for arrivals
        for place in [f"unit {self._unit[0]}"] * (rank() == self._unit[0]) + ["end"] * (rank() == 0):
            self._arrivals.forget(place)
        return {"stream/busy_s": sum(busy), "stream/ranks": float(sum(seconds > 0 for seconds in busy))}

"""The bubble: what a rank does between its own rollout's end and the last one's. It trains the drafter (TLT).

Members of a session move in lockstep from one reduction to the next. Whoever is told to leave takes part in exactly one
more, in which it says so: the step is dropped on all members, and nobody waits for somebody who has left. Only where a
member hangs is the wait for it cut off, ``spot.grace_s`` behind the order to leave.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from megatron_tlt.config.spot import SpotConfig
from megatron_tlt.drafter import FAILURES, DataBuffer, DrafterState, DrafterTrainer, Entry
from megatron_tlt.errors import ConfigError
from megatron_tlt.observe.timeline import SPOT_TRACK, Timeline
from megatron_tlt.platform.device import current_device
from megatron_tlt.platform.rank_group import GroupFailed, RankGroup
from megatron_tlt.platform.subset_group import Abandoned, SubsetGroup
from megatron_tlt.spot import Advice, CoordinatorClient, SessionOrder
from megatron_tlt.trainer.engine_data import EngineData
from megatron_tlt.trainer.spot_checkpoints import SpotCheckpoints

logger = logging.getLogger(__name__)

_WAIT_S = 0.05


class FormGroup(Protocol):
    """As :meth:`SubsetGroup.form`."""

    def __call__(
        self,
        name: str,
        ranks: Sequence[int],
        should_go: Callable[[], bool],
        should_abandon: Callable[[], bool],
        timeout_s: float,
        /,
    ) -> RankGroup: ...


@dataclass(frozen=True)
class SpotReport:
    """What a rank did in an RL step's bubble; times of day in seconds.

    ``version`` is its drafter's behind the bubble, ``led`` whether it led its last session, ``left_at`` when it last
    stopped training, ``used_s`` what it spent in training steps, ``metrics`` those of its last one. ``failed`` sessions
    ended here with what is not finite or with an error; ``cut_off`` ones were given up as others did not come.
    Its buffer held ``entries`` responses; the states of ``dropped`` ones of its engine were not whole. Since the
    process began, ``refused`` messages were not believed and ``unsaved`` checkpoints could not be written.
    """

    version: int = 0
    released_at: float = 0.0
    left_at: float | None = None
    used_s: float = 0.0
    sessions: tuple[int, ...] = ()
    led: bool = False
    failed: int = 0
    cut_off: int = 0
    refused: int = 0
    unsaved: int = 0
    dropped: int = 0
    entries: int = 0
    metrics: dict[str, float] = field(default_factory=dict)


def newest_rank(reports: Sequence[SpotReport]) -> int:
    """The rank whose drafter all take over: of the highest version, of those who led, the first."""
    return max(range(len(reports)), key=lambda rank: (reports[rank].version, reports[rank].led, -rank))


def spot_metrics(reports: Sequence[SpotReport], version: int) -> dict[str, float]:
    """Of all ranks together, which had ``version`` before. Times of several nodes are as exact as their clocks agree.

    ``idle_s`` is what ranks waited for the last one, summed; ``used_s`` how much of it they trained; ``preempt_ms``
    what passed from the last rank's release until nobody trained any more. ``refused_messages`` and
    ``failed_checkpoints`` are counted from the processes' start.
    """
    over = max(report.released_at for report in reports)
    idle_s = sum(over - report.released_at for report in reports)
    left = [report.left_at - over for report in reports if report.left_at is not None]
    # the step in which a rank was told to leave goes on beyond the rollout's end
    beyond = [max(0.0, (report.left_at or over) - over) for report in reports]
    used_s = sum(max(0.0, report.used_s - late) for report, late in zip(reports, beyond, strict=True))
    return {
        "spot/idle_s": idle_s,
        "spot/used_s": used_s,
        "spot/share": used_s / idle_s if idle_s > 0 else 0.0,
        "spot/sessions": float(len({number for report in reports for number in report.sessions})),
        "spot/steps": float(max(report.version for report in reports) - version),
        "spot/preempt_ms": 1e3 * max([0.0, *left]),
        "spot/failed": float(sum(report.failed for report in reports)),
        "spot/cut_off": float(sum(report.cut_off for report in reports)),
        "spot/refused_messages": float(sum(report.refused for report in reports)),
        "spot/failed_checkpoints": float(sum(report.unsaved for report in reports)),
        "spot/dropped_states": float(sum(report.dropped for report in reports)),
    }


class SpotTrainer:
    """One rank's. Nothing that goes wrong in here goes any further: the rank waits for the rollout's end instead.

    Args:
        config: how.
        trainer: of the drafter.
        buffer: this rank's data; none is added meanwhile.
        checkpoints: that a session's leader writes.
        timeline: sessions take a track of their own in it.
        global_batch: responses of a step over all members, however many these are.
        last_good: what the drafter goes back to after a step that was not finite.
        take_device: before the first session of an RL step: the engine leaves the device, the trainer comes.
        newest: the responses that this rank's engine has just ended, if they are kept.
        form: makes a group over some ranks.

    Raises:
        ConfigError: training needs more memory than ``spot.memory_gib``.
    """

    def __init__(
        self,
        config: SpotConfig,
        trainer: DrafterTrainer,
        buffer: DataBuffer,
        checkpoints: SpotCheckpoints,
        timeline: Timeline,
        *,
        global_batch: int,
        last_good: Callable[[], DrafterState],
        take_device: Callable[[], None],
        newest: EngineData | None = None,
        form: FormGroup = SubsetGroup.form,
    ) -> None:
        needed = trainer.needed_bytes / 2**30
        if config.memory_gib is not None and needed > config.memory_gib:
            raise ConfigError(
                f"spot.memory_gib: found {config.memory_gib}; allowed: above {needed:.3g}, which the drafter, its "
                "gradients, its optimizer and the target's embedding and LM head take on each rank"
            )
        self._config, self._trainer, self._buffer = config, trainer, buffer
        self._checkpoints, self._timeline = checkpoints, timeline
        self._batch, self._last_good, self._take_device = global_batch, last_good, take_device
        self._form, self._data = form, newest
        self._newest: Sequence[Entry] | None = None  # of the data, once a session asks
        self._line: CoordinatorClient | None = None
        self._refused: Callable[[], int] = lambda: 0
        self._rl_step = -1
        self._report = SpotReport()
        self._has_device = False
        self._leave_requested_at: float | None = None
        self._steps = 0  # of the generation

    def attach(self, client: CoordinatorClient, refused: Callable[[], int] = lambda: 0) -> None:
        """This rank's line to the coordinator, before the first rollout; ``refused`` counts messages not believed."""
        self._line, self._refused = client, refused

    @property
    def _client(self) -> CoordinatorClient:
        assert self._line is not None, "attach() comes first"
        return self._line

    @property
    def report(self) -> SpotReport:
        """Of the newest bubble."""
        return replace(
            self._report,
            version=self._trainer.version,
            refused=self._refused(),
            unsaved=self._checkpoints.failed,
        )

    def begin(self, rl_step: int) -> None:
        """This rank's share of ``rl_step``'s rollout begins."""
        self._rl_step = rl_step
        self._report = SpotReport()
        self._has_device = False
        self._newest = None
        if self._data is not None:
            self._data.begin()
        self._client.rollout_started(rl_step)

    def train_until_rollout_ends(self, rl_step: int) -> None:
        """Its share is done: trains as it is told, until the last rank's is done or the coordinator is silent."""
        client, released_at = self._client, self._timeline.now()
        entries = len(self._buffer) + (0 if self._data is None else self._data.count)
        self._report = replace(self._report, released_at=released_at, entries=entries)
        client.released(rl_step, self._report.entries, self._trainer.version)
        while not client.rollout_over(rl_step) and not client.is_silent:
            order = client.order
            if order is None or not self._is_free_for(order) or not client.enter(order):
                client.wait(_WAIT_S)
                continue
            try:
                self._session(order)
            except Exception:
                logger.exception("rank %d trains no drafter for the rest of this rollout", client.rank)
                client.withdraw()
        self._newest = None  # the actor's states of them come with the log-probs
        if self._data is not None:
            self._data.end()
            self._report = replace(self._report, dropped=self._data.dropped)

    def _is_free_for(self, order: SessionOrder) -> bool:
        """Two leaders never write checkpoints at the same time."""
        return order.leader == self._client.rank or self._checkpoints.idle()

    def _session(self, order: SessionOrder) -> None:
        """One generation of a session, from its group's making until it is left."""
        client, trainer = self._client, self._trainer
        began, self._leave_requested_at, self._steps = self._timeline.now(), None, 0
        outcome, failed, cut_off = "failed", 0, 0
        try:
            self._get_device()
            with current_device().memory_bound(self._spare_bytes()) as check_memory:
                outcome = self._train(order, check_memory)
        except Abandoned as why:
            outcome, cut_off = "cut off", 1
            logger.warning("rank %d: drafter training: %s", client.rank, why)
        except GroupFailed as why:
            outcome = "broken"
            logger.warning("rank %d: drafter training: %s", client.rank, why)
        except Exception:
            failed = 1
            logger.exception("rank %d trains no drafter for the rest of this rollout", client.rank)
        if outcome in FAILURES:
            failed = 1
            trainer.load_state(self._last_good())
            meaning = FAILURES[outcome]
            logger.warning("drafter training ended with %s: %s; version %d stays", outcome, meaning, trainer.version)
        left_at = self._timeline.now()
        self._report = replace(
            self._report,
            left_at=left_at,
            sessions=tuple({*self._report.sessions, order.session}),
            led=order.leader == client.rank,
            failed=self._report.failed + failed,
            cut_off=self._report.cut_off + cut_off,
        )
        self._timeline.add(
            "drafter training",
            began,
            left_at - began,
            "drafter",
            track=SPOT_TRACK,
            session=order.session,
            generation=order.generation,
            members=len(order.members),
            steps=self._steps,
            ended=outcome,
        )
        self._leave(outcome)
        if order.leader == client.rank and self._is_to_be_saved(order, outcome):
            self._checkpoints.save(self._rl_step)

    def _is_to_be_saved(self, order: SessionOrder, outcome: str) -> bool:
        """Whether the session is over, and not by the rollout's end, behind which there is time enough."""
        if outcome in FAILURES:
            return True  # a checkpoint on the way there is newer, but not good
        following = self._client.order
        ended = following is None or following.session != order.session
        return ended and outcome != "failed" and not self._client.rollout_over(self._rl_step)

    def _leave(self, outcome: str) -> None:
        client = self._client
        if outcome not in ("stopped", "not formed", "broken", "cut off"):
            client.withdraw()  # it would go the same way again
            return
        # told on another member first; a coordinator that says nothing is silent in the end, which is LEAVE too
        while not self._leave_requested():
            client.wait(_WAIT_S)
        client.leave()

    def _train(self, order: SessionOrder, check_memory: Callable[[], None]) -> str:
        """How the generation ended: ``stopped``, ``not formed``, or as a step that was not well."""
        client, trainer = self._client, self._trainer
        group: RankGroup | None = None  # who is alone waits for nobody
        if len(order.members) > 1:
            limit_s = 2 * self._config.session_timeout_s  # the coordinator's comes first
            try:
                group = self._form(order.name, order.members, self._leave_requested, self._is_overdue, limit_s)
            except Abandoned:
                return "not formed"
        leads = order.leader == client.rank
        if leads:
            self._checkpoints.take_over(self._leave_requested)
        trainer.forget_losses()
        trainer.synchronize(order.leader, group)
        at, count = order.members.index(client.rank), len(order.members)
        share = self._batch // count + (at < self._batch % count)
        while True:
            if not self._leave_requested() and client.poll() is Advice.WAIT:
                client.wait(_WAIT_S)
                continue
            began = self._timeline.now()
            result = trainer.train_step(self._draw(share), self._leave_requested, self._rl_step, group)
            self._report = replace(self._report, used_s=self._report.used_s + self._timeline.now() - began)
            if result.outcome != "trained":
                return result.outcome
            check_memory()
            self._report = replace(self._report, metrics=result.metrics)
            self._steps += 1
            client.at_step_boundary(trainer.version)
            if leads:
                self._checkpoints.step_done(self._rl_step)

    def _draw(self, share: int) -> Iterator[Entry]:
        """This rank's part of a step: responses that its engine has just ended, and earlier steps'."""
        if self._newest is None:
            self._newest = [] if self._data is None else self._data.entries(self._rl_step)
        draw = random.Random(f"{self._rl_step}/{self._trainer.version}")
        wanted = share - min(len(self._buffer), round(share * self._buffer.earlier_fraction))
        newest = draw.sample(self._newest, min(wanted, len(self._newest)))
        yield from newest
        yield from self._buffer.sample(share - len(newest), self._rl_step, self._trainer.version)

    def _leave_requested(self) -> bool:
        """Whether this generation is to be left; once so, it stays so, though a silent coordinator may come back."""
        if self._leave_requested_at is None and self._client.poll() is Advice.LEAVE:
            self._leave_requested_at = self._timeline.now()
        return self._leave_requested_at is not None

    def _is_overdue(self) -> bool:
        """Whether that is longer ago than any member should take to hear of it."""
        return (
            self._leave_requested() and self._timeline.now() - (self._leave_requested_at or 0.0) > self._config.grace_s
        )

    def _get_device(self) -> None:
        if not self._has_device:
            self._take_device()
            self._has_device = True

    def _spare_bytes(self) -> int | None:
        """What training may take beyond what it holds all along."""
        if self._config.memory_gib is None:
            return None
        return int(self._config.memory_gib * 2**30) - sum(tensor.nbytes for tensor in self._trainer.held)

    def save(self, rl_step: int) -> None:
        """By the rank with the newest drafter, once nobody waits for it: what the rollout's end left unsaved."""
        self._checkpoints.save(rl_step)

    def close(self) -> None:
        """Waits for a checkpoint that is being written."""
        self._checkpoints.close(self._config.session_timeout_s)

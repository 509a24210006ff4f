"""The spot trainer: a rank trains the drafter from the end of its own rollout to the end of the last one (TLT).

This idle time is the rollout's bubble. Members of a session proceed in lockstep from one reduction to the next. A
member that receives an order to leave takes part in exactly one more reduction and announces its leave there: all
members drop that step, and none waits for a member that has left. If a member hangs, the others stop waiting for it
``spot.grace_s`` after the order to leave.
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
_ORDER_S = 1.0
"""Within it a rank that is free gets an order, if enough ranks are free for a session; an order takes milliseconds."""


class FormGroup(Protocol):
    """The signature of :meth:`SubsetGroup.form`."""

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
    """One rank's drafter training in one RL step; points in time are seconds since the Unix epoch.

    Attributes:
        version: drafter version after the rollout.
        released_at: end of the rank's own rollout.
        left_at: end of its last session; None if it entered none.
        used_s: seconds in training steps.
        sessions: numbers of the sessions that the rank entered.
        led: whether it led its last session.
        failed: sessions that ended here with a non-finite value or an error.
        cut_off: sessions abandoned because other members did not arrive.
        refused: rejected messages since the process started.
        unsaved: failed checkpoint writes since the process started.
        dropped: responses of its engine without complete states.
        entries: responses available for training.
        metrics: of its last training step.
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
    """The rank that broadcasts its drafter: highest version, then session leader, then lowest rank."""
    return max(range(len(reports)), key=lambda rank: (reports[rank].version, reports[rank].led, -rank))


def spot_metrics(reports: Sequence[SpotReport], version: int) -> dict[str, float]:
    """Metrics over all ranks; ``version`` is the drafter's before the step.

    ``idle_s`` is the time that ranks waited for the last one, summed; ``used_s`` is the part of it spent on training;
    ``preempt_ms`` is the time from the last rank's release until no rank trains any more. ``refused_messages`` and
    ``failed_checkpoints`` count from the start of the processes. Across nodes, times are as exact as the clocks agree.
    """
    over = max(report.released_at for report in reports)
    idle_s = sum(over - report.released_at for report in reports)
    left = [report.left_at - over for report in reports if report.left_at is not None]
    # the last training step of a rank may end after the rollout does
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
    """The spot trainer of one rank. Failures are contained; the rank then waits for the rollout to end.

    Args:
        config: the ``spot`` section.
        trainer: of the drafter.
        buffer: this rank's data; nothing may be added to it during a rollout.
        checkpoints: written by a session's leader.
        timeline: receives sessions as a separate track.
        global_batch: responses per step over all members, whatever their number.
        last_good: returns the drafter state to restore after a failed session.
        take_device: called before the first session of an RL step; moves the engine off the device and the trainer
            onto it.
        newest: the responses that this rank's engine has just finished, if they are kept.
        form: creates a group over a subset of ranks.

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
        self._newest: Sequence[Entry] | None = None  # entries of ``_data``, created when a session first needs them
        self._attached: CoordinatorClient | None = None
        self._refused: Callable[[], int] = lambda: 0
        self._rl_step = -1
        self._report = SpotReport()
        self._has_device = False
        self._is_enough: Callable[[], bool] = lambda: False
        self._has_enough = self._withdrawn = self._in_session = False
        self._first_version = 0
        self._leave_requested_at: float | None = None
        self._steps = 0  # in the current generation

    def attach(self, client: CoordinatorClient, refused: Callable[[], int] = lambda: 0) -> None:
        """Sets this rank's coordinator client, before the first rollout; ``refused`` counts rejected messages."""
        self._attached, self._refused = client, refused

    @property
    def _client(self) -> CoordinatorClient:
        assert self._attached is not None, "attach() comes first"
        return self._attached

    @property
    def report(self) -> SpotReport:
        """The report of the newest rollout."""
        return replace(
            self._report,
            version=self._trainer.version,
            refused=self._refused(),
            unsaved=self._checkpoints.failed,
        )

    @property
    def steps(self) -> int:
        """Drafter steps that this rank knows of, in the newest rollout."""
        return self._trainer.version - self._first_version

    @property
    def may_train(self) -> bool:
        """Whether this rank trains, has an order to, or may soon get one; after its own rollout."""
        if self._withdrawn or self._client.is_silent:
            return False
        free_since = max(self._report.released_at, self._report.left_at or 0.0)
        ordered = self._in_session or self._client.order is not None
        return ordered or self._timeline.now() - free_since < _ORDER_S

    def begin(self, rl_step: int) -> None:
        """Called when this rank's rollout of ``rl_step`` starts."""
        self._rl_step, self._first_version, self._has_enough = rl_step, self._trainer.version, False
        self._report = SpotReport()
        self._has_device = self._withdrawn = self._in_session = False
        self._newest = None
        if self._data is not None:
            self._data.begin()
        self._client.rollout_started(rl_step)

    def train_until_rollout_ends(self, rl_step: int, is_enough: Callable[[], bool] = lambda: False) -> None:
        """Trains as the coordinator orders, until the last rank's rollout ends or the coordinator is silent.

        Once ``is_enough()``, the rank leaves its session at the next reduction, and enters none any more.
        """
        self._is_enough = is_enough
        client, released_at = self._client, self._timeline.now()
        entries = len(self._buffer) + (0 if self._data is None else self._data.count)
        self._report = replace(self._report, released_at=released_at, entries=entries)
        client.released(rl_step, self._report.entries, self._trainer.version)
        while not client.rollout_over(rl_step) and not client.is_silent and not self._enough():
            order = client.order
            if order is None or not self._is_free_for(order) or not client.enter(order):
                client.wait(_WAIT_S)
                continue
            self._in_session = True
            try:
                self._session(order)
            except Exception:
                logger.exception("rank %d stops training the drafter until this rollout ends", client.rank)
                self._withdraw()
            self._in_session = False
        if self._has_enough:
            self._withdraw()
        self._newest = None  # the log-prob pass provides the actor's states of these responses
        if self._data is not None:
            self._data.end()
            self._report = replace(self._report, dropped=self._data.dropped)

    def _withdraw(self) -> None:
        self._withdrawn = True
        self._client.withdraw()

    def _is_free_for(self, order: SessionOrder) -> bool:
        """Whether this rank may enter; a former leader first finishes its write, so that one rank writes at a time."""
        return order.leader == self._client.rank or self._checkpoints.idle()

    def _session(self, order: SessionOrder) -> None:
        """Runs one generation of a session, from the creation of its group to the rank's leave."""
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
            logger.exception("rank %d stops training the drafter until this rollout ends", client.rank)
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
        """Whether a failed session, or one that ended before the rollout, is to be saved; else :meth:`save` does it."""
        if outcome in FAILURES:
            return True  # replaces newer checkpoints of the failed session
        following = self._client.order
        ended = following is None or following.session != order.session
        return ended and outcome != "failed" and not self._client.rollout_over(self._rl_step)

    def _leave(self, outcome: str) -> None:
        client = self._client
        if outcome not in ("stopped", "not formed", "broken", "cut off"):
            self._withdraw()  # another attempt would fail in the same way
            return
        # another member received the order first; a coordinator that stops answering also leads to LEAVE
        while not self._leave_requested():
            client.wait(_WAIT_S)
        client.leave()

    def _train(self, order: SessionOrder, check_memory: Callable[[], None]) -> str:
        """Trains one generation; returns ``stopped``, ``not formed``, or the outcome of a failed step."""
        client, trainer = self._client, self._trainer
        group: RankGroup | None = None  # a single member needs no group
        if len(order.members) > 1:
            limit_s = 2 * self._config.session_timeout_s  # the coordinator's own limit expires first
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
            self._report = replace(self._report, metrics=result.metrics)
            self._steps += 1
            client.at_step_boundary(trainer.version)
            if leads:
                self._checkpoints.step_done(self._rl_step)
            check_memory()  # the step counts; no further one is begun

    def _draw(self, share: int) -> Iterator[Entry]:
        """This rank's part of a batch: responses that its engine has just finished, and responses of earlier steps."""
        if self._newest is None:
            self._newest = [] if self._data is None else self._data.entries(self._rl_step)
        draw = random.Random(f"{self._rl_step}/{self._trainer.version}")
        wanted = share - min(len(self._buffer), round(share * self._buffer.earlier_fraction))
        newest = draw.sample(self._newest, min(wanted, len(self._newest)))
        yield from newest
        yield from self._buffer.sample(share - len(newest), self._rl_step, self._trainer.version)

    def _leave_requested(self) -> bool:
        """Whether the rank must or wants to leave this generation.

        An order stays even if a silent coordinator answers again.
        """
        if self._leave_requested_at is None and self._client.poll() is Advice.LEAVE:
            self._leave_requested_at = self._timeline.now()
        return self._leave_requested_at is not None or self._enough()

    def _enough(self) -> bool:
        """Whether this rank has something better to do; it stays so until the rollout ends."""
        self._has_enough = self._has_enough or self._is_enough()
        return self._has_enough

    def _is_overdue(self) -> bool:
        """Whether the order to leave is older than ``grace_s``, so that every member should have received it."""
        self._leave_requested()
        ordered_at = self._leave_requested_at
        return ordered_at is not None and self._timeline.now() - ordered_at > self._config.grace_s

    def _get_device(self) -> None:
        if not self._has_device:
            self._take_device()
            self._has_device = True

    def _spare_bytes(self) -> int | None:
        """Bytes that training may allocate in addition to the trainer's permanent tensors; None without a bound."""
        if self._config.memory_gib is None:
            return None
        return int(self._config.memory_gib * 2**30) - sum(tensor.nbytes for tensor in self._trainer.held)

    def save(self, rl_step: int) -> None:
        """Saves a state that the rollout's end left unsaved; the rank with the newest drafter calls it."""
        self._checkpoints.save(rl_step)

    def close(self) -> None:
        """Waits for a checkpoint write in progress."""
        self._checkpoints.close(self._config.session_timeout_s)

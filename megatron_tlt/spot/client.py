"""A rank's line to the coordinator: reports go out and orders come in on a thread of its own while it computes."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import zmq

from megatron_tlt.config.spot import SpotConfig
from megatron_tlt.spot.fault_hooks import FaultHooks
from megatron_tlt.spot.follower import Follower
from megatron_tlt.spot.messages import LARGEST_DIRECTIVE, Dropped, MessageSigner
from megatron_tlt.spot.threaded import Threaded
from megatron_tlt.spot.types import Advice, Directive, MemberProgress, SessionOrder

_T = TypeVar("_T")


class CoordinatorClient(Threaded):
    """What a rank says to the coordinator, and what it is to do; no call waits for the coordinator but ``wait``.

    The loop of a rank whose share of the rollout is done::

        client.released(rl_step, len(buffer), trainer.version)
        while not client.rollout_over(rl_step) and not client.is_silent:
            order = client.order
            if order is None or not client.enter(order):
                client.wait(0.05)
                continue
            ...  # build a group over order.members, keys below order.name; all take over order.leader's drafter
            while (advice := client.poll()) is not Advice.LEAVE:
                if advice is Advice.TRAIN:
                    ...  # one step; between its micro-batches: give it up if client.poll() is Advice.LEAVE
                    client.at_step_boundary(trainer.version)
                else:
                    client.wait(0.05)
            ...  # give up the group
            client.leave()

    All that waits for other members (building the group, a collective) has to look at ``poll`` meanwhile, as they may
    have been told to leave already. A member whose group breaks, as another died, waits for LEAVE where it is: the
    others' next generation comes as soon as the dead one is missed. One that cannot train says :meth:`withdraw`.

    Any thread may call. Args as of :class:`CoordinatorService`; ``endpoint`` is the service's.
    """

    def __init__(
        self,
        rank: int,
        endpoint: str,
        config: SpotConfig,
        seal: MessageSigner,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            f"spot-client-{rank}",
            f"rank {rank}'s line to the spot coordinator failed; it trains no drafter from here on",
        )
        self.rank = rank
        self._seal = seal
        self._hooks = FaultHooks("report")
        self._clock = clock
        self._heartbeat_s = config.heartbeat_s
        # above what this rank used before, had it been started again with the same secret
        self._follower = Follower(rank, config.silent_after_s, clock(), first_sequence=time.time_ns())
        self._dropped: Counter[str] = Counter()
        self._news = threading.Condition()
        self._news_count = self._news_seen = 0
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_DIRECTIVE)
        # nothing is kept for a coordinator that is not there: the next report says it all
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._socket.connect(endpoint)
        self._start()

    # What the rank tells

    def rollout_started(self, rl_step: int) -> None:
        """Its share of ``rl_step``'s rollout begins.

        Raises:
            ValueError: an RL step that is not after the one before.
            RuntimeError: it is still inside a session.
        """
        self._tell(lambda: self._follower.rollout_started(rl_step))

    def released(self, rl_step: int, num_entries: int, drafter_version: int = 0) -> None:
        """Its share of ``rl_step``'s rollout is done, and it may train; its buffer holds ``num_entries`` responses.

        Raises:
            ValueError: another RL step than the one whose rollout was started.
        """
        self._tell(lambda: self._follower.released(rl_step, num_entries, drafter_version))

    def withdraw(self) -> None:
        """Something else needs it, or it cannot train: it left, and enters no session until ``released`` again."""
        self._tell(self._follower.withdraw)

    def enter(self, order: SessionOrder) -> bool:
        """Whether ``order`` still stands; the rank counts as inside from then on, and builds its group."""
        return self._tell(lambda: self._follower.enter(order, self._clock()))

    def at_step_boundary(self, drafter_version: int) -> None:
        """A step of the session that it is in is done.

        Raises:
            RuntimeError: it is in no session.
        """
        self._tell(lambda: self._follower.at_step_boundary(drafter_version))

    def leave(self) -> None:
        """It is out of the session's group, as it was advised; unbidden, that is to withdraw."""
        self._tell(self._follower.leave)

    # What it is told

    def poll(self) -> Advice:
        """What to do now, from what has arrived; takes microseconds."""
        with self._news:
            self._news_seen = self._news_count
            return self._follower.advice(self._clock())

    def wait(self, timeout_s: float) -> bool:
        """Wait for orders that ``poll`` has not seen, ``timeout_s`` at most; whether there are any."""
        with self._news:
            found = self._news.wait_for(lambda: self._news_count != self._news_seen, timeout_s)
            self._news_seen = self._news_count
            return found

    @property
    def order(self) -> SessionOrder | None:
        """The session that this rank is wanted in."""
        return self._follower.order

    @property
    def place(self) -> MemberProgress | None:
        """Where it trains."""
        return self._follower.place

    def rollout_over(self, rl_step: int) -> bool:
        """Whether ``rl_step``'s rollout is known to be over on all replicas."""
        return self._follower.rollout_over(rl_step)

    @property
    def silent_for(self) -> float:
        """Seconds without a word from the coordinator."""
        return self._follower.silent_for(self._clock())

    @property
    def is_silent(self) -> bool:
        """Whether the coordinator cannot be relied on: who trains leaves, and the rollout's end shows otherwise."""
        return self._follower.is_silent(self._clock())

    @property
    def counts(self) -> dict[str, int]:
        """Directives passed over, and ``messages REASON`` of what was dropped."""
        with self._news:
            return {**self._follower.counts, **{f"messages {reason}": n for reason, n in self._dropped.items()}}

    def _tell(self, change: Callable[[], _T]) -> _T:
        """Change what is reported, and have it reported at once."""
        with self._news:
            result = change()
        self._wake_up()
        return result

    # The thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        next_heartbeat = time.monotonic()
        while not self._closing:
            wait = max(0.0, next_heartbeat - time.monotonic())
            ready = dict(poller.poll(math.ceil(wait * 1000)))
            if self._socket in ready:
                self._receive()
            if self._wake in ready:
                os.eventfd_read(self._wake)
            if self._wake in ready or time.monotonic() >= next_heartbeat:
                self._report()
                next_heartbeat = time.monotonic() + self._heartbeat_s

    def _report(self) -> None:
        with self._news:
            report = self._follower.report()
        # not connected, or nobody reads: the next report says it all
        frames = self._seal.close(report)
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart(frames, zmq.NOBLOCK)
            self._hooks.sent(frames)

    def _receive(self) -> None:
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            with self._news:
                try:
                    directive = self._seal.open(frames, Directive)
                except Dropped as dropped:
                    self._dropped[dropped.reason] += 1
                    continue
                if self._follower.hear(directive, self._clock()):
                    self._news_count += 1
                    self._news.notify_all()

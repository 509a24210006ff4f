"""A rank's connection to the coordinator: a thread sends reports and receives orders while the rank computes."""

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
    """Sends a rank's reports to the coordinator and receives its orders; only ``wait`` blocks.

    Loop of a rank whose share of the rollout is done::

        client.released(rl_step, len(buffer), trainer.version)
        while not client.rollout_over(rl_step) and not client.is_silent:
            order = client.order
            if order is None or not client.enter(order):
                client.wait(0.05)
                continue
            ...  # build a group over order.members, keys below order.name; broadcast order.leader's drafter
            while (advice := client.poll()) is not Advice.LEAVE:
                if advice is Advice.TRAIN:
                    ...  # one step; abandon it between micro-batches if client.poll() is Advice.LEAVE
                    client.at_step_boundary(trainer.version)
                else:
                    client.wait(0.05)
            ...  # destroy the group
            client.leave()

    Code that waits for other members (group construction, a collective) must also check ``poll``, because they may
    already have been ordered to leave. If a member dies and the group breaks, the others wait for LEAVE; their next
    generation starts once the dead member's heartbeat times out. A rank that cannot train calls :meth:`withdraw`.

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
            f"rank {rank}'s connection to the spot coordinator failed; it trains no drafter from now on",
        )
        self.rank = rank
        self._signer = seal
        self._hooks = FaultHooks("report")
        self._clock = clock
        self._heartbeat_s = config.heartbeat_s
        # above the numbers that this rank used before a restart with the same secret
        self._follower = Follower(rank, config.silent_after_s, clock(), first_sequence=time.time_ns())
        self._dropped: Counter[str] = Counter()
        self._news = threading.Condition()
        self._news_count = self._news_seen = 0
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_DIRECTIVE)
        # queue nothing for an absent coordinator: the next report contains the full state
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._socket.connect(endpoint)
        self._start()

    # Reports of the rank

    def rollout_started(self, rl_step: int) -> None:
        """Report that this rank's share of ``rl_step``'s rollout starts.

        Raises:
            ValueError: ``rl_step`` is not greater than the previous one.
            RuntimeError: the rank is still in a session.
        """
        self._tell(lambda: self._follower.rollout_started(rl_step))

    def released(self, rl_step: int, num_entries: int, drafter_version: int = 0) -> None:
        """Report that this rank finished its share of the rollout and may train on ``num_entries`` buffered responses.

        Raises:
            ValueError: ``rl_step`` is not that of the started rollout.
        """
        self._tell(lambda: self._follower.released(rl_step, num_entries, drafter_version))

    def withdraw(self) -> None:
        """Report that this rank left and cannot train; it enters no session until ``released`` is called again."""
        self._tell(self._follower.withdraw)

    def enter(self, order: SessionOrder) -> bool:
        """Enter the session of ``order``; returns whether the order is still valid, so that the group can be built."""
        return self._tell(lambda: self._follower.enter(order, self._clock()))

    def at_step_boundary(self, drafter_version: int) -> None:
        """Report that a step of the current session is done.

        Raises:
            RuntimeError: the rank is in no session.
        """
        self._tell(lambda: self._follower.at_step_boundary(drafter_version))

    def leave(self) -> None:
        """Report that this rank left the session's group; without an order to leave this is a :meth:`withdraw`."""
        self._tell(self._follower.leave)

    # Orders to the rank

    def poll(self) -> Advice:
        """What to do now, according to the received orders; takes microseconds."""
        with self._news:
            self._news_seen = self._news_count
            return self._follower.advice(self._clock())

    def wait(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` for orders that ``poll`` has not seen; return whether there are any."""
        with self._news:
            found = self._news.wait_for(lambda: self._news_count != self._news_seen, timeout_s)
            self._news_seen = self._news_count
            return found

    @property
    def order(self) -> SessionOrder | None:
        """The session that this rank should join."""
        return self._follower.order

    @property
    def place(self) -> MemberProgress | None:
        """The rank's position in its session."""
        return self._follower.place

    def rollout_over(self, rl_step: int) -> bool:
        """Whether ``rl_step``'s rollout is known to be over on all replicas."""
        return self._follower.rollout_over(rl_step)

    @property
    def silent_for(self) -> float:
        """Seconds since the last message from the coordinator."""
        return self._follower.silent_for(self._clock())

    @property
    def is_silent(self) -> bool:
        """Whether the coordinator is unresponsive: training ranks leave, and only the rollout itself shows its end."""
        return self._follower.is_silent(self._clock())

    @property
    def counts(self) -> dict[str, int]:
        """Ignored directives by reason, and ``messages REASON`` for dropped messages."""
        with self._news:
            return {**self._follower.counts, **{f"messages {reason}": n for reason, n in self._dropped.items()}}

    def _tell(self, change: Callable[[], _T]) -> _T:
        """Change the reported state and send it at once."""
        with self._news:
            result = change()
        self._wake_up()
        return result

    # Thread

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
        # not connected, or the peer does not read: the next report contains the full state
        frames = self._signer.close(report)
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
                    directive = self._signer.open(frames, Directive)
                except Dropped as dropped:
                    self._dropped[dropped.reason] += 1
                    continue
                if self._follower.hear(directive, self._clock()):
                    self._news_count += 1
                    self._news.notify_all()

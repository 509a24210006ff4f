"""Runs the coordinator in a thread of rank 0, with a ZeroMQ socket on one address."""

from __future__ import annotations

import contextlib
import ipaddress
import math
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import zmq

from megatron_tlt.config.spot import SpotConfig
from megatron_tlt.errors import ConfigError, RunError
from megatron_tlt.spot.coordinator import Coordinator
from megatron_tlt.spot.fault_hooks import FaultHooks
from megatron_tlt.spot.messages import LARGEST_REPORT, Dropped, MessageSigner
from megatron_tlt.spot.threaded import Threaded
from megatron_tlt.spot.types import Directive, Report

_MOST_AT_ONCE = 1 << 16
"""Messages per round: several from each of very many ranks, but a flood cannot postpone deadlines forever."""
_LONGEST_ROUND_S = 1.0


class CoordinatorService(Threaded):
    """Listens at ``endpoint`` from construction until ``close``.

    Received messages cannot raise in the owner's thread. If the service's own thread fails, the failure is logged and
    stored in ``failure``. Clients then see a silent coordinator: drafter training ends and the run continues.

    Args:
        replicas: the ranks of each engine.
        host: a single address or host name of this machine that all ranks reach, not a wildcard.
        port: 0 selects a free port.
        clock: monotonic seconds.

    Raises:
        ConfigError: ``host`` is not a single address.
        RunError: the address cannot be bound.
    """

    def __init__(
        self,
        replicas: Sequence[Sequence[int]],
        config: SpotConfig,
        seal: MessageSigner,
        host: str,
        port: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        address = _one_address(host)
        super().__init__(
            "spot-coordinator", "the spot coordinator failed; no drafter is trained during rollouts from now on"
        )
        self._signer = seal
        self._hooks = FaultHooks("directive")
        self._clock = clock
        # above all numbers that an earlier coordinator of this run may have used
        self._machine = Coordinator(replicas, config, clock(), first_sequence=time.time_ns())
        self._routes: dict[int, bytes] = {}
        self._dropped: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        # above this size ZeroMQ closes the connection before it receives the message
        self._socket.setsockopt(zmq.MAXMSGSIZE, 64 * LARGEST_REPORT)
        try:
            self._socket.bind(f"tcp://{address}:{port or '*'}")
        except zmq.ZMQError as error:
            self._abandon()
            raise RunError(f"the coordinator cannot listen on {address}:{port}: {error.strerror}") from error
        self.endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        """``tcp://ADDRESS:PORT``, for the clients."""
        self._start()

    @property
    def counts(self) -> dict[str, int]:
        """Event counts by name: the state machine's, and ``messages REASON`` for dropped messages."""
        with self._lock:
            return {**self._machine.counts, **{f"messages {reason}": n for reason, n in self._dropped.items()}}

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        while not self._closing:
            wait = min(self._machine.next_deadline() - self._clock(), _LONGEST_ROUND_S)
            poller.poll(max(0, math.ceil(wait * 1000)))
            self._hooks.hold(lambda: self._closing)
            self._round(self._clock())

    def _round(self, now: float) -> None:
        """Handle received messages before deadlines, so that a delayed coordinator does not declare ranks lost."""
        with self._lock:
            for _ in range(_MOST_AT_ONCE):
                try:
                    route, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                self._receive(route, frames, now)
            self._send(self._machine.tick(now))

    def _receive(self, route: bytes, frames: Sequence[bytes], now: float) -> None:
        try:
            report = self._signer.open(frames, Report)
        except Dropped as dropped:
            self._dropped[dropped.reason] += 1
            return
        directives = self._machine.handle(report, now)
        if directives:
            # only new, signed messages update a rank's route
            self._routes[report.rank] = route
        self._send(directives)

    def _send(self, directives: Iterable[Directive]) -> None:
        for directive in directives:
            # skip a peer that is gone or does not read: its next report is answered again
            frames = self._signer.close(directive)
            with contextlib.suppress(zmq.Again):
                self._socket.send_multipart([self._routes[directive.rank], *frames], zmq.NOBLOCK, copy=True)
                self._hooks.sent(frames)


def _one_address(host: str) -> str:
    """Resolve ``host`` to its IPv4 address."""
    allowed = "allowed: one address of this machine, or a host name for it"
    try:
        address = socket.gethostbyname(host) if host else ""
        found = ipaddress.IPv4Address(address)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the coordinator's host: found {host!r}, which is not an IPv4 address; {allowed}") from error
    if found.is_unspecified or found.is_multicast or address == "255.255.255.255":
        raise ConfigError(f"the coordinator's host: found {host!r}, which is not a single interface; {allowed}")
    return address

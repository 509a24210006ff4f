"""The coordinator as a thread of rank 0: a ZeroMQ socket on one address around the state machine."""

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
"""Messages of a round: some from each of very many ranks, but no flood of them puts deadlines off for ever."""
_LONGEST_ROUND_S = 1.0


class CoordinatorService(Threaded):
    """Listens at ``endpoint`` from its construction until ``close``.

    Nothing that arrives can raise in the owner's thread. Should the service's own thread fail, it ends, the failure is
    logged and stays in ``failure``, and the clients see a silent coordinator: training drafters ends, the run goes on.

    Args:
        replicas: the ranks of each engine.
        host: an address of this machine, or a name of one, that all ranks reach; never all of them.
        port: 0 takes a free one.
        clock: seconds, only growing.

    Raises:
        ConfigError: ``host`` is no single address.
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
            "spot-coordinator", "the spot coordinator failed; no drafter is trained during rollouts from here on"
        )
        self._seal = seal
        self._hooks = FaultHooks("directive")
        self._clock = clock
        # above what an earlier coordinator of this run may have used
        self._machine = Coordinator(replicas, config, clock(), first_sequence=time.time_ns())
        self._routes: dict[int, bytes] = {}
        self._dropped: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        # beyond what is merely dropped and counted, ZeroMQ ends the connection before it takes the message in
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
        """What happened so far, by name: of the state machine, and ``messages REASON`` of what was dropped."""
        with self._lock:
            return {**self._machine.counts, **{f"messages {reason}": n for reason, n in self._dropped.items()}}

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        while not self._closing:
            wait = min(self._machine.next_deadline() - self._clock(), _LONGEST_ROUND_S)
            poller.poll(max(0, math.ceil(wait * 1000)))
            self._hooks.hold()
            self._round(self._clock())

    def _round(self, now: float) -> None:
        """What has arrived comes before any deadline: a coordinator that was held up takes nobody for lost."""
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
            report = self._seal.open(frames, Report)
        except Dropped as dropped:
            self._dropped[dropped.reason] += 1
            return
        directives = self._machine.handle(report, now)
        if directives:
            # only what was new and signed says where a rank is to be found
            self._routes[report.rank] = route
        self._send(directives)

    def _send(self, directives: Iterable[Directive]) -> None:
        for directive in directives:
            # a peer that is gone, or takes nothing in, is passed over: its next report is answered again
            frames = self._seal.close(directive)
            with contextlib.suppress(zmq.Again):
                self._socket.send_multipart([self._routes[directive.rank], *frames], zmq.NOBLOCK, copy=True)
                self._hooks.sent(frames)


def _one_address(host: str) -> str:
    """The IPv4 address that ``host`` stands for."""
    allowed = "allowed: one address of this machine, or a name of it"
    try:
        address = socket.gethostbyname(host) if host else ""
        found = ipaddress.IPv4Address(address)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the coordinator's host: found {host!r}, which is no IPv4 address; {allowed}") from error
    if found.is_unspecified or found.is_multicast or address == "255.255.255.255":
        raise ConfigError(f"the coordinator's host: found {host!r}, which is not one interface; {allowed}")
    return address

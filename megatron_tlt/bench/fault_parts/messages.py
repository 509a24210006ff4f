"""The spot coordinator and its ranks over real ZeroMQ, with faults of network, messages, ranks and clocks."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import zmq

from megatron_tlt.bench.fault_parts.trial import Part, check
from megatron_tlt.config.spot import SpotConfig
from megatron_tlt.spot.client import CoordinatorClient
from megatron_tlt.spot.messages import MessageSigner, new_secret
from megatron_tlt.spot.service import CoordinatorService
from megatron_tlt.spot.types import Advice, Report

_CONFIG = SpotConfig(min_replicas=2, min_entries=1, heartbeat_s=0.05, silent_after_s=0.4, lost_after_s=0.8)
_LIMIT_S = 30.0
_HOST = "127.0.0.1"
_NETWORKS: dict[str, dict[str, float]] = {
    "lossy network": {"lost": 0.3},
    "duplicated messages": {"duplicated": 0.8},
    "reordered messages": {"reordered": 0.8},
    "delayed messages": {"delayed": 0.3},
    "slow network": {"delayed": 1.0},
}


class _Clock:
    """A node's clock, which may be set while it is read."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


class _Rollout:
    """The ranks of one rollout, each in a thread, and what must hold of them at any time."""

    def __init__(self, clients: list[CoordinatorClient], rl_step: int, service: CoordinatorService) -> None:
        self._clients, self._rl_step, self._service = clients, rl_step, service
        self._left = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._busy = len(clients)
        self._names: dict[tuple[int, int], set[str]] = defaultdict(set)
        self._problems: list[str] = []
        self._over = threading.Event()

    def run(self, decode_s: list[float], fault: Callable[[], None]) -> None:
        threads = [
            threading.Thread(target=self._rank, args=(client, seconds), daemon=True)
            for client, seconds in zip(self._clients, decode_s, strict=True)
        ]
        for thread in threads:
            thread.start()
        fault()
        end = time.monotonic() + _LIMIT_S
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
            check(not thread.is_alive(), f"a rank's rollout does not end within {_LIMIT_S:g} s")
        check(not self._problems, "; ".join(self._problems[:3]))
        torn = {place: names for place, names in self._names.items() if len(names) > 1}
        check(not torn, f"a step was trained under two generations: {torn}")

    def _rank(self, client: CoordinatorClient, decode_s: float) -> None:
        try:
            self._take_part(client, decode_s)
        except Exception as error:
            self._problems.append(f"rank {client.rank}: {type(error).__name__}: {error}")

    def _take_part(self, client: CoordinatorClient, decode_s: float) -> None:
        client.rollout_started(self._rl_step)
        time.sleep(decode_s)
        with self._lock:
            self._busy -= 1
            if self._busy == 0:
                self._over.set()
        client.released(self._rl_step, 5)
        while not self._is_over(client) and not client.is_silent:
            order = client.order
            if order is None or not client.enter(order):
                client.wait(0.02)
                continue
            while (advice := client.poll()) is not Advice.LEAVE and not client.is_silent:
                if advice is Advice.TRAIN and client.place is not None:
                    with self._lock:
                        self._names[client.place.session, client.place.step].add(order.name)
                    client.at_step_boundary(0)
                client.wait(0.01)
            client.leave()
        # without a coordinator, the collectives of the run show the end of the rollout
        self._over.wait(_LIMIT_S)

    def _is_over(self, client: CoordinatorClient) -> bool:
        over = client.rollout_over(self._rl_step)
        # a rank whose heartbeats do not arrive is taken for lost, and nobody waits for it
        if over and not self._over.is_set() and not self._service.counts.get("replicas lost"):
            self._problems.append(f"rank {client.rank} was told that the rollout is over while one decodes")
        return over


@contextmanager
def _relayed(endpoint: str, rng: random.Random, network: dict[str, float]) -> Iterator[tuple[str, int]]:
    """A relay between clients and service: its endpoint and process."""
    options = json.dumps({"target": endpoint, "seed": rng.randrange(1 << 30), **network})
    command = [sys.executable, "-m", "megatron_tlt.bench.workers.coordinator_relay", options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as relay:
        try:
            assert relay.stdout is not None
            yield relay.stdout.readline().strip(), relay.pid
        finally:
            relay.kill()


def _trial(fault: str, rng: random.Random, folder: Path) -> None:
    ranks, clock, seal = rng.randint(2, 5), _Clock(), MessageSigner(new_secret(), "run")
    with ExitStack() as stack:
        service = stack.enter_context(
            CoordinatorService([(rank,) for rank in range(ranks)], _CONFIG, seal, _HOST, clock=clock)
        )
        endpoint, relay = service.endpoint, 0
        if fault in _NETWORKS or fault in ("cut network", "dead network"):
            endpoint, relay = stack.enter_context(_relayed(service.endpoint, rng, _NETWORKS.get(fault, {})))
        clients = [stack.enter_context(CoordinatorClient(rank, endpoint, _CONFIG, seal)) for rank in range(ranks)]
        for rl_step in range(2):
            decode_s = [rng.uniform(0.0, 0.2) for _ in range(ranks - 1)] + [rng.uniform(0.4, 1.0)]
            rng.shuffle(decode_s)
            act = partial(_act, fault, rng, service, clock, seal, relay) if rl_step == 0 else (lambda: None)
            _Rollout(clients, rl_step, service).run(decode_s, act)
        check(service.failure is None, f"the service failed: {service.failure}")


def _act(
    fault: str, rng: random.Random, service: CoordinatorService, clock: _Clock, seal: MessageSigner, relay: int
) -> None:
    """Does what happens at one moment of a rollout."""
    time.sleep(rng.uniform(0.0, 0.6))
    if fault == "cut network":
        os.kill(relay, signal.SIGSTOP)
        time.sleep(rng.uniform(0.05, 1.5))
        os.kill(relay, signal.SIGCONT)
    elif fault == "dead network":
        os.kill(relay, signal.SIGKILL)
    elif fault == "clock jump":
        clock.ahead_s += rng.choice((-1, 1)) * rng.uniform(0.1, 3600.0)
    elif fault == "coordinator ends":
        service.close()
    elif fault == "forged messages":
        _forge(rng, service.endpoint, seal)


def _forge(rng: random.Random, endpoint: str, seal: MessageSigner) -> None:
    """Strangers say that ranks are done: unsigned, with another secret, for another run, cut short, or repeated."""
    lie = Report(0, 1 << 62, 0, True, True, 5, 0, None, -1)
    stranger, (mac, payload) = MessageSigner(new_secret(), "run"), seal.close(lie)
    damaged = bytearray(payload)
    damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    forged = [
        [payload],
        stranger.close(lie),
        [mac, bytes(damaged)],
        [mac, payload[:-1]],
        [mac, rng.randbytes(rng.randint(1, 5000))],
        [rng.randbytes(rng.randint(0, 64)) for _ in range(rng.randint(1, 4))],
    ]
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 200)
        socket.connect(endpoint)
        for _ in range(rng.randint(1, 20)):
            socket.send_multipart(rng.choice(forged))
        time.sleep(0.05)


def messages_part() -> Part:
    """The coordinator and its ranks with the faults that they are to survive."""
    others = ("cut network", "dead network", "clock jump", "coordinator ends", "forged messages")
    return {fault: partial(_trial, fault) for fault in (*_NETWORKS, *others)}

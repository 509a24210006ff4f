"""Service and clients over real ZeroMQ: unsigned peers, a delayed or failed service, a killed rank."""

from __future__ import annotations

import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import zmq

from megatron_tlt.config.spot import SpotConfig
from megatron_tlt.errors import ConfigError, RunError
from megatron_tlt.spot import (
    Advice,
    CoordinatorClient,
    CoordinatorService,
    Directive,
    MessageSigner,
    Report,
    new_secret,
)

HOST = "127.0.0.1"
CONFIG = SpotConfig(min_replicas=2, min_entries=1, heartbeat_s=0.1, lost_after_s=2.0, silent_after_s=1.0)
LIMIT_S = 30.0


def until(condition: Callable[[], object]) -> None:
    """Wait for a condition that has to become true; the time it takes does not matter."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


class HeldClock:
    """A clock that blocks the service's thread until it is released."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.go_on.set()
        self.error: Exception | None = None

    def __call__(self) -> float:
        assert self.go_on.wait(LIMIT_S)
        if self.error is not None:
            raise self.error
        return time.monotonic()


class Run:
    """A service, its clients, and an unsigned peer."""

    def __init__(self, stack: ExitStack, ranks: int, config: SpotConfig = CONFIG) -> None:
        self.clock = HeldClock()
        self.secret = new_secret()
        self.seal = MessageSigner(self.secret, "run")
        self.config = config
        self.stack = stack
        replicas = [(rank,) for rank in range(ranks)]
        self.service = stack.enter_context(CoordinatorService(replicas, config, self.seal, HOST, clock=self.clock))
        self.clients: list[CoordinatorClient] = []

    def connect(self, *ranks: int) -> None:
        for rank in ranks:
            client = CoordinatorClient(rank, self.service.endpoint, self.config, self.seal)
            self.clients.append(self.stack.enter_context(client))

    def stranger(self) -> zmq.Socket[bytes]:
        context = self.stack.enter_context(zmq.Context())
        dealer = self.stack.enter_context(context.socket(zmq.DEALER))
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVTIMEO, 10_000)
        dealer.connect(self.service.endpoint)
        return dealer

    def count(self, name: str) -> int:
        return self.service.counts.get(name, 0)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_released_ranks_train_until_the_last_rollout_ends(stack: ExitStack) -> None:
    run = Run(stack, 4)
    run.connect(0, 1, 2, 3)
    for client in run.clients:
        client.rollout_started(0)
    trained = []

    def rank(client: CoordinatorClient) -> None:
        """The documented loop of a released rank."""
        client.released(0, 5, 0)
        while not client.rollout_over(0):
            order = client.order
            if order is None or not client.enter(order):
                client.wait(0.05)
                continue
            while (advice := client.poll()) is not Advice.LEAVE:
                if advice is Advice.TRAIN:
                    assert client.place is not None
                    trained.append((client.rank, order.name, client.place.step))
                    client.at_step_boundary(1)
                else:
                    client.wait(0.05)
            client.leave()

    threads = [threading.Thread(target=rank, args=(client,)) for client in run.clients[:3]]
    for thread in threads:
        thread.start()
    until(lambda: {number for number, _, step in trained if step > 20} == {0, 1, 2})
    assert not any(client.rollout_over(0) for client in run.clients)
    run.clients[3].released(0, 5)
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    generations: dict[int, set[str]] = {}
    for _, name, step in trained:
        generations.setdefault(step, set()).add(name)
    assert all(len(names) == 1 for names in generations.values()), "a step is trained under one generation"
    assert run.count("sessions") == 1 and run.service.failure is None


def test_unsigned_peers_are_dropped_and_counted(stack: ExitStack) -> None:
    run = Run(stack, 2)
    run.connect(0, 1)
    for client in run.clients:
        client.rollout_started(0)
    stranger = run.stranger()
    lie = Report(1, 2**62, 5, True, True, 0, 0, None, -1)
    mac, payload = run.seal.close(lie)
    stranger.send_multipart([payload])
    stranger.send_multipart([b"", payload])
    stranger.send_multipart(MessageSigner(new_secret(), "run").close(lie))
    stranger.send_multipart(MessageSigner(run.secret, "another run").close(lie))
    stranger.send_multipart([mac, payload[:-1] + b"\x00"])
    stranger.send_multipart([b"junk", os.urandom(64)])
    stranger.send_multipart([mac, payload, b"more"])
    stranger.send_multipart([mac, os.urandom(5000)])
    until(lambda: run.count("messages oversized") == 1)
    counts = run.service.counts
    assert {name: n for name, n in counts.items() if name.startswith("messages")} == {
        "messages unsigned": 2,
        "messages forged": 3,
        "messages malformed": 2,
        "messages oversized": 1,
    }
    for client in run.clients:
        client.released(0, 5)
    until(lambda: all(client.rollout_over(0) for client in run.clients))
    assert run.service.failure is None


def test_replayed_messages_have_no_effect(stack: ExitStack) -> None:
    run = Run(stack, 2)
    recorded = run.seal.close(Report(0, 1, 0, True, True, 5, 0, None, -1))
    first, stranger = run.stranger(), run.stranger()
    first.send_multipart(recorded)
    assert run.seal.open(first.recv_multipart(), Directive).rank == 0
    for _ in range(3):
        stranger.send_multipart(recorded)
    until(lambda: run.count("reports replayed") == 3)
    # nor does the unsigned peer receive the rank's directives from then on
    run.connect(1)
    run.clients[0].rollout_started(0)
    run.clients[0].released(0, 5)
    assert run.seal.open(first.recv_multipart(), Directive).rollout_over
    assert not stranger.poll(0)


def test_a_false_coordinator_is_rejected(stack: ExitStack) -> None:
    context = stack.enter_context(zmq.Context())
    router = stack.enter_context(context.socket(zmq.ROUTER))
    router.setsockopt(zmq.LINGER, 0)
    port = router.bind_to_random_port(f"tcp://{HOST}")
    seal = MessageSigner(new_secret(), "run")
    client = stack.enter_context(CoordinatorClient(0, f"tcp://{HOST}:{port}", CONFIG, seal))
    client.rollout_started(0)
    route, *frames = router.recv_multipart()
    over = Directive(0, 2**62, 0, True, None)
    for answer in (MessageSigner(new_secret(), "run").close(over), seal.close(over)[1:], frames):
        router.send_multipart([route, *answer])
    until(lambda: client.counts == {"messages forged": 2, "messages unsigned": 1})
    until(lambda: client.is_silent)
    assert not client.rollout_over(0)
    genuine = seal.close(over)
    for _ in range(2):
        router.send_multipart([route, *genuine])
    until(lambda: client.rollout_over(0))
    until(lambda: client.counts.get("replayed") == 1)


def test_a_service_delayed_for_five_seconds_blocks_and_loses_no_rank(stack: ExitStack) -> None:
    run = Run(stack, 3)
    run.connect(0, 1, 2)
    for client in run.clients:
        client.rollout_started(0)
    for client in run.clients[:2]:
        client.released(0, 5)
    until(lambda: all(client.order is not None for client in run.clients[:2]))
    run.clock.go_on.clear()
    began = time.monotonic()
    stack.callback(run.clock.go_on.set)
    slowest = 0.0
    while time.monotonic() - began < 5.0:
        for client in run.clients:
            before = time.perf_counter()
            client.poll()
            client.released(0, 5)
            slowest = max(slowest, time.perf_counter() - before)
        time.sleep(0.02)
    assert slowest < 0.5
    assert all(client.is_silent and client.poll() is Advice.WAIT for client in run.clients)
    run.clock.go_on.set()
    until(lambda: all(client.rollout_over(0) and not client.is_silent for client in run.clients))
    assert run.count("replicas lost") == 0, "what had arrived meanwhile counts first"
    for client in run.clients:
        client.rollout_started(1)
    for client in run.clients[:2]:
        client.released(1, 5)
    until(lambda: all(client.poll() is Advice.ENTER for client in run.clients[:2]))


_CLIENT = """
import sys, threading
from megatron_tlt.spot import CoordinatorClient, MessageSigner
from megatron_tlt.config.spot import SpotConfig
config = SpotConfig(heartbeat_s=0.1, lost_after_s=2.0, silent_after_s=1.0)
client = CoordinatorClient(2, sys.argv[1], config, MessageSigner(sys.stdin.buffer.read(32), "run"))
client.rollout_started(0)
threading.Event().wait(60)
"""


def test_a_killed_rank_is_lost_and_the_rollout_ends_without_it(stack: ExitStack) -> None:
    run = Run(stack, 3)
    run.connect(0, 1)
    for client in run.clients:
        client.rollout_started(0)
    process = subprocess.Popen([sys.executable, "-c", _CLIENT, run.service.endpoint], stdin=subprocess.PIPE)
    stack.callback(process.wait)
    stack.callback(process.kill)
    assert process.stdin is not None
    process.stdin.write(run.secret)
    process.stdin.close()
    # it may already have been counted as lost while it started
    until(lambda: run.count("replicas lost") == run.count("ranks that came back") and _hears_of(run, 3))
    lost = run.count("replicas lost")
    for client in run.clients:
        client.released(0, 5)
    until(lambda: all(client.order is not None for client in run.clients))
    assert not any(client.rollout_over(0) for client in run.clients)
    os.kill(process.pid, signal.SIGKILL)
    killed = time.monotonic()
    until(lambda: all(client.rollout_over(0) for client in run.clients))
    assert time.monotonic() - killed >= CONFIG.lost_after_s - 3 * CONFIG.heartbeat_s
    assert run.count("replicas lost") == lost + 1


def _hears_of(run: Run, ranks: int) -> bool:
    return len(run.service._routes) == ranks


def test_heartbeats_continue_while_the_rank_computes(stack: ExitStack) -> None:
    run = Run(stack, 2)
    run.connect(0, 1)
    run.clients[0].rollout_started(0)
    end = time.monotonic() + 1.5 * CONFIG.lost_after_s
    while time.monotonic() < end:
        sum(range(100_000))
    assert run.count("replicas lost") == 0


def test_poll_takes_microseconds(stack: ExitStack) -> None:
    run = Run(stack, 1, SpotConfig(min_replicas=1, min_entries=1, silent_after_s=10))
    run.connect(0)
    client = run.clients[0]
    client.rollout_started(0)

    def one() -> float:
        before = time.perf_counter()
        client.poll()
        return time.perf_counter() - before

    assert statistics.median(one() for _ in range(5000)) < 50e-6


def test_a_failed_service_affects_only_drafter_training(stack: ExitStack, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(stack, 1)
    run.connect(0)
    client = run.clients[0]
    client.rollout_started(0)
    until(lambda: client.silent_for < 1.0)
    run.clock.error = OSError("no more time")
    until(lambda: run.service.failure is run.clock.error)
    until(lambda: client.is_silent)
    assert "spot coordinator failed" in caplog.text
    client.released(0, 5)
    assert client.poll() is Advice.WAIT and not client.rollout_over(0)
    run.service.close()


def test_closing_frees_the_port_and_may_be_repeated() -> None:
    seal = MessageSigner(new_secret(), "run")
    service = CoordinatorService([(0,)], CONFIG, seal, HOST)
    port = int(service.endpoint.rpartition(":")[2])
    client = CoordinatorClient(0, service.endpoint, CONFIG, seal)
    for _ in range(2):
        service.close()
        client.close()
    client.withdraw()
    with CoordinatorService([(0,)], CONFIG, seal, HOST, port) as again:
        assert again.endpoint == service.endpoint


def test_clients_connect_to_a_service_that_starts_later(stack: ExitStack) -> None:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    seal = MessageSigner(new_secret(), "run")
    client = stack.enter_context(CoordinatorClient(0, f"tcp://{HOST}:{port}", CONFIG, seal))
    client.rollout_started(0)
    client.released(0, 5)
    until(lambda: client.is_silent)
    stack.enter_context(CoordinatorService([(0,)], CONFIG, seal, HOST, port))
    until(lambda: client.rollout_over(0) and not client.is_silent)


@pytest.mark.parametrize("host", ["*", "0.0.0.0", "", "::", "255.255.255.255", "224.0.0.1", "no such name"])
def test_a_host_that_is_not_one_interface_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=r"the coordinator's host: found .*allowed: one address"):
        CoordinatorService([(0,)], CONFIG, MessageSigner(new_secret(), "run"), host)


def test_it_listens_on_the_given_address_only(stack: ExitStack) -> None:
    run = Run(stack, 1)
    port = int(run.service.endpoint.removeprefix(f"tcp://{HOST}:"))
    with socket.socket() as probe:
        # another loopback address: in use if the service had bound all addresses
        probe.bind(("127.0.0.2", port))
        assert probe.getsockname()[1] == port


def test_a_port_in_use_is_one_clear_error(stack: ExitStack) -> None:
    port = int(Run(stack, 1).service.endpoint.rpartition(":")[2])
    with pytest.raises(RunError, match=f"cannot listen on {HOST}:{port}: Address already in use"):
        CoordinatorService([(0,)], CONFIG, MessageSigner(new_secret(), "run"), HOST, port)

"""The spot coordinator: rules in random histories, scale of the state machine, reaction times over real ZeroMQ."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from megatron_tlt.bench.coordinator_histories import FAULTS, run_history
from megatron_tlt.bench.coordinator_scale import play_rollout
from megatron_tlt.bench.result import BenchmarkResult
from megatron_tlt.config.spot import SpotConfig
from megatron_tlt.errors import RunError
from megatron_tlt.observe.environment import describe_environment
from megatron_tlt.spot.messages import MessageSigner, new_secret
from megatron_tlt.spot.service import CoordinatorService

HEARTBEAT_S = 0.25
SPREAD_S = 0.4
"""Period within which the ranks of a rollout are released, one after another."""
LEAD_S = 0.3
NETWORKS: dict[str, dict[str, float] | None] = {
    "none": None,
    "none, through the relay": {},
    "lost": {"lost": 0.1},
    "duplicated": {"duplicated": 0.3},
    "reordered": {"reordered": 0.5},
    "delayed": {"delayed": 0.1},
}
"""Faults of the relay between clients and service; None: no relay."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--histories", type=int, default=2000, help="random histories for each kind of fault")
    parser.add_argument("--replicas", type=int, default=10_000, help="simulated replicas of one state machine")
    parser.add_argument("--clients", type=int, default=64, help="real clients")
    parser.add_argument("--processes", type=int, default=4, help="processes that the real clients share")
    parser.add_argument("--rollouts", type=int, default=15, help="rollouts of the real clients on each network")
    parser.add_argument("--first-seed", type=int, default=1_000_000, help="the tests' histories start at 0")


def _milliseconds(seconds: Sequence[float]) -> dict[str, float]:
    return {f"p{at}": float(np.percentile(seconds, at)) * 1000 if seconds else float("nan") for at in (50, 99)}


def _histories(result: BenchmarkResult, arguments: argparse.Namespace) -> None:
    violations, checked = 0, 0
    for name, faults in FAULTS.items():
        counts: Counter[str] = Counter()
        reports = steps = broken = 0
        for seed in range(arguments.first_seed, arguments.first_seed + arguments.histories):
            history = run_history(seed, faults)
            counts += history.counts
            reports += history.reports
            steps += history.steps
            broken += len(history.violations)
        result.rows.append(
            {
                "case": "histories",
                "faults": name,
                "runs": arguments.histories,
                "violations": broken,
                "reports": reports,
                "generations": counts["sessions"] + counts["further generations"],
                "steps": steps,
                "what_happened": [f"{n} {what}" for what, n in sorted(counts.items())],
            }
        )
        violations, checked = violations + broken, checked + arguments.histories
    result.target("violated_rules", violations, "==", 0)
    result.target("histories", checked, ">=", 10_000)


def _scale(result: BenchmarkResult, arguments: argparse.Namespace) -> None:
    slowest, unsettled = float("inf"), 0
    for name, faults in FAULTS.items():
        load = play_rollout(arguments.replicas, faults, arguments.first_seed)
        rate = len(load.seconds) / sum(load.seconds)
        result.rows.append(
            {
                "case": f"{arguments.replicas} replicas",
                "faults": name,
                "runs": 1,
                "violations": load.unsettled,
                "reports": len(load.seconds),
                "directives": load.directives,
                "generations": load.generations,
                "decisions_per_s": rate,
                "decision_ms": {**_milliseconds(load.seconds), "max": max(load.seconds) * 1000},
            }
        )
        slowest, unsettled = min(slowest, rate), unsettled + load.unsettled
    result.target("decisions_per_s_slowest", slowest, ">=", 20_000)
    result.target("simulated_ranks_not_settled", unsettled, "==", 0)


class _Clients:
    """The real clients in their processes."""

    def __init__(self, stack: ExitStack, endpoint: str, secret: bytes, config: SpotConfig, args: Any) -> None:
        self.poll_s: list[float] = []
        self._processes = []
        for index in range(args.processes):
            options = {
                "endpoint": endpoint,
                "run_id": "bench",
                "config": config.model_dump(),
                "ranks": list(range(index, args.clients, args.processes)),
            }
            process = stack.enter_context(_process("megatron_tlt.bench.workers.coordinator", options))
            assert process.stdin is not None
            process.stdin.write(secret)
            process.stdin.flush()
            self._processes.append(process)
        for process in self._processes:
            self.poll_s.append(_answer(process)["poll_s"])

    def rollout(self, rl_step: int, release_at: Mapping[int, float]) -> list[dict[str, Any]]:
        """Runs one rollout; returns what every client observed."""
        line = json.dumps({"rl_step": rl_step, "release_at": release_at}).encode() + b"\n"
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(line)
            process.stdin.flush()
        return [seen for process in self._processes for seen in _answer(process)]


@contextmanager
def _process(module: str, options: Mapping[str, Any]) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", module, json.dumps(options)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def _answer(process: subprocess.Popen[bytes]) -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RunError(f"a process of the coordinator benchmark ended with status {process.wait()}")
    return json.loads(line)


def _reactions(seen: Sequence[dict[str, Any]], min_replicas: int) -> tuple[list[float], list[float], int]:
    """Seconds until each client has the first session's orders and the rollout's end, and the number missed."""
    released = sorted(rank["released"] for rank in seen)
    possible, ended = released[min_replicas - 1], released[-1]
    first = [rank for rank in seen if rank["generation"] == 1]
    to_session = [rank["ordered"] - max(possible, rank["released"]) for rank in first]
    to_end = [rank["over"] - ended for rank in seen if rank["over"] is not None]
    early = sum(seconds < 0 for seconds in to_end)
    return to_session, to_end, early + len(seen) - len(to_end)


def _real(result: BenchmarkResult, arguments: argparse.Namespace) -> None:
    """Runs all networks, then the clients' polls; each network has its own service and clients."""
    count = arguments.clients
    least = count // 2
    config = SpotConfig(
        min_replicas=least,
        min_entries=1,
        heartbeat_s=HEARTBEAT_S,
        lost_after_s=10,
        silent_after_s=10,
        session_timeout_s=60,
    )
    polls: list[float] = []
    missed = 0
    p99: dict[str, float] = {}
    for name, faults in NETWORKS.items():
        rng = random.Random(arguments.first_seed)
        secret = new_secret()
        with ExitStack() as stack:
            service = stack.enter_context(
                CoordinatorService([(i,) for i in range(count)], config, MessageSigner(secret, "bench"), "127.0.0.1")
            )
            endpoint = service.endpoint
            if faults is not None:
                options = {"target": endpoint, "seed": arguments.first_seed, **faults}
                relay = stack.enter_context(_process("megatron_tlt.bench.workers.coordinator_relay", options))
                assert relay.stdout is not None
                endpoint = relay.stdout.readline().decode().strip()
            clients = _Clients(stack, endpoint, secret, config, arguments)
            polls += clients.poll_s
            sessions: list[float] = []
            ends: list[float] = []
            wrong = 0
            for rl_step in range(1 + arguments.rollouts):
                start = time.monotonic() + LEAD_S
                seen = clients.rollout(rl_step, {i: start + rng.random() * SPREAD_S for i in range(count)})
                if rl_step == 0:
                    continue  # while connections are made
                to_session, to_end, missing = _reactions(seen, least)
                sessions, ends, wrong = sessions + to_session, ends + to_end, wrong + missing
            counts = service.counts
            if service.failure is not None:
                raise RunError(f"the coordinator failed: {service.failure}") from service.failure
        row = {
            "case": f"{count} clients",
            "faults": name,
            "runs": arguments.rollouts,
            "violations": wrong,
            "generations": counts.get("sessions", 0) + counts.get("further generations", 0),
            "to_session_ms": _milliseconds(sessions),
            "to_over_ms": _milliseconds(ends),
            "what_happened": [f"{n} {what}" for what, n in sorted(counts.items())],
        }
        result.rows.append(row)
        p99[name] = max(_milliseconds(times)["p99"] for times in (sessions, ends))
        missed += wrong
    result.target("clients_that_missed_or_foresaw_the_end", missed, "==", 0)
    result.target("reaction_p99_ms_without_faults", p99["none"], "<=", 50)
    others = max(value for name, value in p99.items() if NETWORKS[name])
    result.target("reaction_p99_ms_with_faults", others, "<=", 4000 * HEARTBEAT_S)
    result.target("poll_us", statistics.median(polls) * 1e6, "<=", 50)


def run(arguments: argparse.Namespace) -> BenchmarkResult:
    """A row per kind of fault: histories, one rollout of very many replicas, rollouts of real clients.

    Reaction times run from the release that makes a session possible (the last one) until each member has its order
    (each client knows the end), on one clock; all processes share this machine.
    """
    result = BenchmarkResult(environment=describe_environment(), name="coordinator")
    _real(result, arguments)
    _scale(result, arguments)
    _histories(result, arguments)
    return result

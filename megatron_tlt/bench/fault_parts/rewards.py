"""Verifiers that go wild, and verifiers' processes that are killed or stopped."""

from __future__ import annotations

import random
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from megatron_tlt.bench.fault_parts import wild
from megatron_tlt.bench.fault_parts.trial import Broken, Part, check
from megatron_tlt.rewards.pool import RewardPool
from megatron_tlt.rewards.types import Reward
from megatron_tlt.tasks.types import Problem

_TIMEOUT_S = 1.0
_COLLECTED_WITHIN_S = 60.0
_PROBLEM = Problem(uid="problem", source="faults", prompt="", answer="", verifier=wild.PATH)


def _collect(pool: RewardPool) -> dict[Any, Reward]:
    """All rewards; Broken if they do not come."""
    found: list[dict[Any, Reward]] = []
    failed: list[BaseException] = []

    def collect() -> None:
        try:
            found.append(pool.collect())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    thread.join(_COLLECTED_WITHIN_S)
    check(not thread.is_alive(), f"no end of rewards within {_COLLECTED_WITHIN_S:g} s")
    if failed:
        raise Broken(f"the pool failed: {failed[0]}")
    return found[0]


def _wild(request: str, rng: random.Random, folder: Path) -> None:
    responses = ["good"] * rng.randint(3, 10)
    at = rng.randrange(len(responses))
    responses[at] = request
    with RewardPool(rng.randint(1, 2), _TIMEOUT_S, [wild.PATH]) as pool:
        for key, response in enumerate(responses):
            pool.submit(key, _PROBLEM, response)
        found = _collect(pool)
    check(sorted(found) == list(range(len(responses))), f"rewards of {sorted(found)}")
    for key, reward in found.items():
        if key == at:
            check(reward.value == 0.0 and not reward.correct, f"{request} was rewarded: {reward}")
        else:
            check(reward.correct, f"{request} cost another response its reward: {reward}")


def _signalled(number: signal.Signals, rng: random.Random, folder: Path) -> None:
    """A verifier's process gets a signal at a random moment: it costs the response in work, and no other."""
    count = rng.randint(20, 200)
    with RewardPool(1, _TIMEOUT_S, [wild.PATH]) as pool:
        for key in range(count):
            pool.submit(key, _PROBLEM, "good")
            if key == 0:
                check(_collect(pool)[0].correct, "no reward before the fault")
        (worker,) = psutil.Process().children()
        threading.Timer(rng.uniform(0.0, 0.02), worker.send_signal, (number,)).start()
        found = _collect(pool)
    check(sorted(found) == list(range(1, count)), f"rewards of {len(found)} of {count - 1}")
    lost = [reward for reward in found.values() if not reward.correct]
    check(len(lost) <= 1 and all(reward.error for reward in lost), f"a signal cost {len(lost)} rewards")


def rewards_part() -> Part:
    """The pool of verifiers with the faults that it is to survive."""
    part = {f"verifier: {request}": partial(_wild, request) for request in wild.REQUESTS}
    signals = {f"verifier: {number.name}": partial(_signalled, number) for number in (signal.SIGKILL, signal.SIGSTOP)}
    return part | signals

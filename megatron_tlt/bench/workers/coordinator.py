"""Some ranks of the coordinator benchmark in one process: real clients, one thread each; training is a wait.

Reads the secret, then a line of JSON per rollout (its number, its start time, the release time of each rank). Answers
each with a line of what every rank observed and when, on the machine's monotonic clock.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from megatron_tlt.config.spot import SpotConfig
from megatron_tlt.platform.processes import stay_with_parent
from megatron_tlt.spot.client import CoordinatorClient
from megatron_tlt.spot.messages import SECRET_BYTES, MessageSigner
from megatron_tlt.spot.types import Advice

STEP_S = 0.2
_LIMIT_S = 60.0


class _Ordered:
    """When a rank first received an order, and its generation."""

    def __init__(self) -> None:
        self.at: float | None = None
        self.generation: int | None = None

    def see(self, generation: int) -> None:
        if self.at is None:
            self.at, self.generation = time.monotonic(), generation


def _take_part(client: CoordinatorClient, rl_step: int, release_at: float) -> dict[str, Any]:
    """A rank's part in one rollout."""
    client.rollout_started(rl_step)
    time.sleep(max(0.0, release_at - time.monotonic()))
    released = time.monotonic()
    client.released(rl_step, 1)
    ordered, limit = _Ordered(), released + _LIMIT_S
    while not client.rollout_over(rl_step) and time.monotonic() < limit:
        order = client.order
        if order is None or not client.enter(order):
            client.wait(1.0)
            continue
        ordered.see(order.generation)
        step_ends = time.monotonic() + STEP_S
        while (advice := client.poll()) is not Advice.LEAVE:
            client.wait(max(0.0, step_ends - time.monotonic()) if advice is Advice.TRAIN else 1.0)
            if advice is Advice.TRAIN and time.monotonic() >= step_ends:
                client.at_step_boundary(0)
                step_ends += STEP_S
        client.leave()
    over = time.monotonic()
    return {
        "rank": client.rank,
        "released": released,
        "ordered": ordered.at,
        "generation": ordered.generation,
        "over": over if client.rollout_over(rl_step) else None,
    }


def _poll_s(client: CoordinatorClient) -> float:
    """The median time of a poll without news."""

    def one() -> float:
        began = time.perf_counter()
        client.poll()
        return time.perf_counter() - began

    return statistics.median(one() for _ in range(5000))


def main() -> None:
    stay_with_parent()
    options = json.loads(sys.argv[1])
    seal = MessageSigner(sys.stdin.buffer.read(SECRET_BYTES), options["run_id"])
    config = SpotConfig(**options["config"])
    clients = [CoordinatorClient(rank, options["endpoint"], config, seal) for rank in options["ranks"]]
    print(json.dumps({"poll_s": _poll_s(clients[0])}), flush=True)
    with ThreadPoolExecutor(len(clients)) as pool:
        for line in sys.stdin.buffer:
            rollout = json.loads(line)
            parts = [
                pool.submit(_take_part, client, rollout["rl_step"], rollout["release_at"][str(client.rank)])
                for client in clients
            ]
            print(json.dumps([part.result() for part in parts]), flush=True)
    for client in clients:
        client.close()


if __name__ == "__main__":
    main()

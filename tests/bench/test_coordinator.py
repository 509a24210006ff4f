"""The coordinator benchmark: it measures what it says, and simulated rollouts come to their end."""

from __future__ import annotations

import argparse
import json
import time

import pytest
import zmq

from megatron_tlt.bench import coordinator
from megatron_tlt.bench.coordinator_histories import FAULTS
from megatron_tlt.bench.coordinator_scale import play_rollout


def seen(released: float, ordered: float | None, over: float | None, generation: int | None = 1) -> dict[str, object]:
    return {"released": released, "ordered": ordered, "generation": generation, "over": over}


def test_reactions_are_from_what_made_them_possible() -> None:
    ranks = [seen(1.0, 2.5, 5.5), seen(2.0, 2.25, 5.25), seen(3.0, 9.0, None, 2), seen(5.0, None, 4.5, None)]
    to_session, to_end, wrong = coordinator._reactions(ranks, 2)
    assert to_session == [0.5, 0.25], "from the second release; who joins later is not counted"
    assert to_end == [0.5, 0.25, -0.5] and wrong == 2, "one never knew, one knew too early"


@pytest.mark.parametrize("faults", FAULTS)
def test_many_replicas_settle(faults: str) -> None:
    load = play_rollout(200, FAULTS[faults], seed=1)
    assert load.unsettled == 0 and load.generations > 1 and len(load.seconds) > 1000
    assert load.directives < 3 * len(load.seconds)


@pytest.mark.parametrize(
    ("faults", "least", "most"), [({}, 200, 200), ({"lost": 0.5}, 50, 150), ({"duplicated": 1.0}, 400, 400)]
)
def test_the_relay_does_to_messages_what_it_is_told(faults: dict[str, float], least: int, most: int) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, context.socket(zmq.DEALER) as dealer:
        for socket in (router, dealer):
            socket.setsockopt(zmq.LINGER, 0)
        target = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
        options = {"target": target, "seed": 1, **faults}
        with coordinator._process("megatron_tlt.bench.workers.coordinator_relay", options) as relay:
            assert relay.stdout is not None
            dealer.connect(relay.stdout.readline().decode().strip())
            for i in range(200):
                dealer.send_multipart([b"message", str(i).encode()])
            arrived = []
            limit = time.monotonic() + 20
            # what comes, comes within the relay's small delays; the first may take its connection's time
            while len(arrived) < most and time.monotonic() < limit and (not arrived or router.poll(500)):
                if router.poll(500):
                    arrived.append(tuple(router.recv_multipart()[1:]))
        assert least <= len(arrived) <= most
        assert set(arrived) <= {(b"message", str(i).encode()) for i in range(200)}


def test_a_small_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "NETWORKS", {"none": None, "lost": {"lost": 0.1}})
    parser = argparse.ArgumentParser()
    coordinator.add_arguments(parser)
    few = ["--histories", "3", "--replicas", "20", "--clients", "6", "--processes", "2", "--rollouts", "2"]
    result = coordinator.run(parser.parse_args(few))
    json.dumps(result.to_dict())
    cases = {row["case"] for row in result.rows}
    assert cases == {"6 clients", "20 replicas", "histories"}
    for name in ("violated_rules", "simulated_ranks_not_settled", "clients_that_missed_or_foresaw_the_end"):
        assert result.targets[name]["met"], result.targets
    assert not result.targets["histories"]["met"] and result.targets["histories"]["value"] == 3 * len(FAULTS)
    real = result.rows[0]
    assert real["generations"] >= 2 and 0 < real["to_over_ms"]["p50"] <= real["to_over_ms"]["p99"]

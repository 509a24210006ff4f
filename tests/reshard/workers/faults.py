"""One rank of an actor and its engines whose resharding goes wrong as told; prints how it ends.

Each fault meets engines that already generated from whole weights: they must refuse to afterwards.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from megatron_tlt.actor.policy import Policy
from megatron_tlt.errors import RunError
from megatron_tlt.platform.device import barrier, initialize_distributed, prepare, rank
from megatron_tlt.reshard.direct import DirectSync, WholeTensors
from megatron_tlt.reshard.exchange import BucketExchange
from megatron_tlt.reshard.interface import SpanViews
from megatron_tlt.rollout.types import Request, SamplingSpec
from megatron_tlt.rollout.vllm_engine import VllmEngine
from tests.reshard.workers.plain import DyingExchange, FlippingExchange
from tests.reshard.workers.trained import config_of

LOST = "model.layers.1.mlp.down_proj.weight"


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())  # in one piece


def way(policy: Policy, engine: VllmEngine, exchange: type[BucketExchange], lose: str = "") -> DirectSync:
    weights = policy.model.weights

    def held() -> SpanViews:
        return [(span, view) for span, view in policy.held_spans() if span.tensor != lose]

    return DirectSync(
        held,
        engine,
        WholeTensors(weights.shapes, weights.cut_dims),
        source_layout="actor TP2",
        engine_layout="TP1 x 2",
        staging_bytes=2**18,
        exchange=exchange,
    )


def attempt(name: str, engine: VllmEngine, sync: DirectSync) -> None:
    """A synchronization that must fail, and what the engine says to a request then."""
    try:
        sync.sync(version=9, verify=True)
        say(f"UNNOTICED {name}")
        return
    except RunError as error:
        say(f"ENDED {name} rank {rank()}: {error}")
    try:
        generate(engine)
        say(f"GENERATED {name} rank {rank()}")
    except RunError as error:
        say(f"REFUSED {name} rank {rank()}: {error}")


def generate(engine: VllmEngine) -> None:
    engine.generate([Request("a", (1, 2, 3), SamplingSpec(temperature=0.0, max_tokens=4), seed=0)])


def main(folder: str, kill: str) -> None:
    prepare()
    initialize_distributed(60)
    config = config_of(Path(folder), {"megatron": {"tensor_model_parallel_size": 2}, "engine_tp": 1})
    policy = Policy(Path(folder), config.actor, seed=0, trainable=False)
    engine = VllmEngine(Path(folder), config.rollout, config.speculation, seed=0)
    whole = way(policy, engine, BucketExchange)
    whole.sync(version=1, verify=True)
    generate(engine)
    if kill == "kill":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher ends the others: this one speaks first
        attempt("killed", engine, way(policy, engine, DyingExchange))
        return
    attempt("missing", engine, way(policy, engine, BucketExchange, lose=LOST))
    barrier()
    attempt("flipped", engine, way(policy, engine, FlippingExchange))
    barrier()
    whole.sync(version=2, verify=True)  # whole again
    generate(engine)
    assert engine.versions["policy"] == 2
    barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])

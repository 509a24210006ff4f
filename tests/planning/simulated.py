"""Small clusters for the tests of the simulation, and engines step by step to hold it against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_tlt.bench.tuner_oracle import OracleTuner
from megatron_tlt.planning.devices import device
from megatron_tlt.planning.simulation.acceptance import OFF, DraftShape, chain
from megatron_tlt.planning.simulation.constants import shipped
from megatron_tlt.planning.simulation.engine import EngineModel
from megatron_tlt.planning.simulation.lengths import LongTail
from megatron_tlt.planning.simulation.rollout import Limits, Speculation
from megatron_tlt.planning.simulation.scenario import Scenario, Spot
from megatron_tlt.speculation.gate import ElasticGate
from megatron_tlt.speculation.strategy import Strategy
from tests.planning.jobs import SEVEN

MODEL = SEVEN
ARMS = (OFF, chain(1), chain(3), chain(6))


def engine(tp: int = 2) -> EngineModel:
    return EngineModel(MODEL, device("H100-80GB"), tp, shipped())


class FreeDrafts(EngineModel):
    """Drafting and verifying cost nothing."""

    def round(self, batch: Any, context: Any, draft: DraftShape) -> Any:
        return self.plain(batch, context)


def scenario(**changes: Any) -> Scenario:
    """16 devices in two nodes, 128 responses."""
    one = Scenario(
        model=MODEL,
        device=device("H100-80GB"),
        constants=shipped(),
        lengths=LongTail(600.0, 1.0),
        devices=16,
        per_node=8,
        engine_devices=2,
        prompts=16,
        group=8,
        prompt_tokens=100,
        max_response_tokens=4096,
        memory_fraction=0.8,
        max_seqs=64,
        arms=(chain(3), chain(1), chain(6)),
        spot=Spot(min_entries=4),
    )
    return replace(one, **changes)


def step_by_step(
    engine: EngineModel, lengths: Sequence[float], prompt: float, limits: Limits, speculation: Speculation
) -> float:
    """Seconds until one engine is done: the product's gate before each step, its oracle tuner under the gate.

    Every request gains its expected tokens in every step. First come, first served; nothing is preempted.
    """
    gate = ElasticGate(int(speculation.threshold), speculation.patience, speculation.hysteresis)
    gains = dict(zip(speculation.arms, speculation.tokens, strict=True))
    arms = {Strategy("eagle", arm.depth) if arm.depth else Strategy(): arm for arm in speculation.arms}
    waiting, running, seconds = list(lengths), [], 0.0
    while waiting or running:
        come = waiting[: limits.max_seqs - len(running)]
        del waiting[: len(come)]
        seconds += float(engine.prefill(prompt * len(come)))
        running += [[prompt, length] for length in come]
        context = sum(cached for cached, _ in running)
        arm = OFF
        if gate.update(len(running)):
            rate = {s: gains[a] / float(engine.round(len(running), context, a)) for s, a in arms.items()}
            arm = arms[OracleTuner(list(arms), lambda s, batch, rate=rate: rate[s]).choose(len(running))]
        seconds += float(engine.round(len(running), context, arm))
        gain = gains[arm]
        running = [[cached + gain, left - gain] for cached, left in running if left - gain > 1e-9]
    return seconds


def random_lengths(seed: int, engines: int, requests: int, longest: int = 3000) -> np.ndarray:
    rng = np.random.default_rng(seed)
    lengths = np.ceil(np.exp(rng.normal(np.log(400.0), 1.2, (engines, requests))))
    return np.minimum(lengths, longest) * (rng.random((engines, requests)) < 0.9)

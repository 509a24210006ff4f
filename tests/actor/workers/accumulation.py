"""Takes the same step from all samples at once and from parts, of which some ranks accumulated the first, by layout."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch

from megatron_tlt.actor.policy import Policy
from megatron_tlt.algorithms.registry import build_loss
from megatron_tlt.config.algorithm import AlgorithmConfig
from megatron_tlt.platform.device import barrier, initialize_distributed, rank
from tests.actor.workers.layouts import CP2, PP2, TP2SP, VP2, batch, policy_of, weights_of

NO_AUXILIARY_LOSS = {"moe_aux_loss_coeff": 0.0, "moe_router_load_balancing_type": "none"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp4": {},
    "dp4-padded": {},
    "tp2sp": TP2SP,
    "pp2": PP2,
    "pp2vp2": PP2 | VP2,
    "cp2": CP2,
    "moe-dp4": NO_AUXILIARY_LOSS,
    "dp4-whole": {},
    "pp2-whole": PP2,
    "dp4-lora": {},
    "tp2-lora": {"tensor_model_parallel_size": 2},
}
LORA = {"rank": 4, "alpha": 8.0}
EARLY = {0: [[0, 2], [4]], 1: [[5]]}
"""Samples that a data-parallel rank accumulates before the step, part by part."""
LATE = [1, 3]
RATE = 1000.0


def accumulating(folder: Path, name: str) -> Policy:
    """A policy whose step is its gradient, and so long that the rounding of the weights does not hide it."""
    optimizer = {"optimizer": "sgd", "lr": RATE, "sgd_momentum": 0.0, "weight_decay": 0.0, "clip_grad": 0.0}
    sharding = "tensor" if name.endswith("-whole") else "element"
    lora = LORA if name.endswith("-lora") else None
    policy = policy_of(
        folder,
        name,
        megatron=LAYOUTS[name],
        optimizer=optimizer,
        optimizer_sharding=sharding,
        lr_warmup_steps=0,
        lora=lora,
    )
    for group in policy.optimizer.param_groups:  # the first step changes nothing; the second shows what it left
        group["lr"] = 0.0
    return policy


def main(folder: str, out: str) -> None:
    from megatron.core import parallel_state

    initialize_distributed(120)
    rows: dict[str, Any] = {}
    for number, name in enumerate(LAYOUTS):
        aggregation = ("token_mean", "sequence_mean")[number % 2]
        loss = build_loss(AlgorithmConfig.model_validate({"loss_aggregation": aggregation}))
        data = batch()
        data = data.with_columns(
            old_log_probs_G=torch.full((sum(data.response_length(i) for i in data.held),), -4.0),
            advantages_N=torch.linspace(-1, 1, data.num_samples, dtype=torch.float64),
        )
        whole = accumulating(Path(folder), name)
        initial = weights_of(whole)
        expected = [whole.update(data, loss) for _ in range(2)]
        whole_weights = weights_of(whole)
        parts = accumulating(Path(folder), name)
        found = []
        for _ in range(2):
            for part in EARLY.get(parallel_state.get_data_parallel_rank(), []):
                scores = parts.log_probs(data.select(part), alone=True)
                assert scores.samples == tuple(range(len(part)))
                parts.accumulate(data.select(part), loss)
            found.append(parts.update(data.select(LATE), loss))
        weights = weights_of(parts)
        steps = {key: whole_weights[key] - initial[key] for key in weights}
        errors = {key: float((weights[key] - whole_weights[key]).norm()) for key in weights}
        rows[name] = {
            "error": math.hypot(*errors.values()) / math.hypot(*(float(step.norm()) for step in steps.values())),
            "worst": max(errors[key] / float(step.norm()) for key, step in steps.items() if step.any()),
            "expected": expected,
            "found": found,
        }
    if rank() == 0:
        Path(out, "rows.json").write_text(json.dumps(rows))
    barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])

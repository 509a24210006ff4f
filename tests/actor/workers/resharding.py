"""Saves under every layout, loads under every other one in the same processes, writes the losses that follow."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from megatron_tlt.actor.megatron_checkpoint import load_policy, save_policy
from megatron_tlt.actor.policy import Policy
from megatron_tlt.algorithms.losses import negative_log_likelihood
from megatron_tlt.config.schema import ActorConfig
from megatron_tlt.platform.device import barrier, initialize_distributed, rank
from tests.actor.workers.layouts import batch

TP2SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "dense": {
        "dp2": {},
        "tp2sp": TP2SP,
        "pp2": PP2,
        "pp2vp2": PP2 | {"virtual_pipeline_model_parallel_size": 2},
    },
    "moe": {
        "moe-dp2": {},
        "moe-ep2": EP2,
        "moe-pp2": PP2,
        "moe-tp2ep2": TP2SP | EP2 | {"expert_tensor_parallel_size": 1},
    },
}
"""By the model's folder."""


def policy_of(folder: Path, megatron: dict[str, Any]) -> Policy:
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    actor = ActorConfig(
        transformer_impl="local",
        megatron=megatron,
        optimizer={"lr": 1e-3, "weight_decay": 0.01},
        lr_warmup_steps=6,
        max_tokens_per_micro_batch=64,
    )
    return Policy(folder, actor, seed=0, total_steps=8)


def losses(policy: Policy, steps: int) -> list[float]:
    return [policy.update(batch(), negative_log_likelihood)["loss"] for _ in range(steps)]


def forget_optimizer(policy: Policy) -> None:
    for wrapper in policy.optimizer.chained_optimizers:
        for state in wrapper.optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()


def main(folder: str, out: str) -> None:
    initialize_distributed(120)
    found: dict[str, dict[str, list[float]]] = {}
    for name, layouts in LAYOUTS.items():
        found |= resume_everywhere(Path(folder, name), layouts, Path(out))
    if rank() == 0:
        Path(out, "rows.json").write_text(json.dumps(found))
    barrier()


def resume_everywhere(model: Path, layouts: dict[str, dict[str, Any]], out: Path) -> dict[str, dict[str, list[float]]]:
    """Losses by source and target; each target is built once and loads all checkpoints, as building takes the time."""
    found = {}
    for source, megatron in layouts.items():
        policy = policy_of(model, megatron)
        losses(policy, 2)
        if rank() == 0:
            (out / source).mkdir()
        barrier()
        save_policy(policy, out / source)
        found[source] = {"uninterrupted": losses(policy, 3)}
    for target, megatron in layouts.items():
        resumed = policy_of(model, megatron)
        for source, rows in found.items():
            load_policy(resumed, out / source)
            rows[target] = losses(resumed, 3)
    for source, rows in found.items():
        load_policy(resumed, out / source)
        forget_optimizer(resumed)
        rows["without optimizer state"] = losses(resumed, 3)
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])

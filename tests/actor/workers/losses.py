"""Gradients of every loss under three layouts of four processes, one after another."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from megatron_tlt.actor.policy import Policy
from megatron_tlt.algorithms.registry import build_loss
from megatron_tlt.config.algorithm import AlgorithmConfig, KlConfig
from megatron_tlt.config.schema import ActorConfig
from megatron_tlt.platform.device import barrier, initialize_distributed, rank
from tests.helpers.samples import Sample, batch_of

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2pp2": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    "cp2dp2": {"context_parallel_size": 2},
    "dp4": {},
}
KL = KlConfig(coefficient=0.2, estimator="k2")
LOSSES = {
    "clipped": AlgorithmConfig(clip_high=0.28, dual_clip=1.2, kl=KL, entropy_coefficient=0.01),
    "gspo": AlgorithmConfig(name="gspo", clip_low=0.05, clip_high=0.05),
    "cispo": AlgorithmConfig(name="cispo", kl=KL),
    "dr_grpo": AlgorithmConfig(name="dr_grpo", loss_aggregation="sequence_sum_norm", sequence_norm_tokens=24),
}
NAME = "lm_head.weight"
VOCABULARY = 64


def samples() -> list[Sample]:
    """Eight of unequal lengths; old and reference log-probs lie around those of a model of small weights."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for index in range(8):
        length = 7 + 5 * index % 13
        tokens = torch.randint(VOCABULARY, (length,), generator=generator).tolist()
        count = length - length // 2
        old, reference = (-4.1 + 0.3 * torch.randn(2, count, generator=generator)).tolist()
        advantage = float(torch.randn((), generator=generator))
        weights = torch.rand(count, generator=generator).tolist()
        found.append(
            Sample(
                tuple(tokens),
                length // 2,
                advantage,
                old_log_probs=tuple(old),
                reference_log_probs=tuple(reference),
                token_weights=tuple(weights),
            )
        )
    return found


def gradient(folder: Path, layout: str, config: AlgorithmConfig) -> list[list[float]]:
    """Of the output layer: gradient descent at rate 1 changes its weights by that."""
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    actor = ActorConfig(
        transformer_impl="local",
        megatron=LAYOUTS[layout],
        optimizer={"optimizer": "sgd", "sgd_momentum": 0.0, "lr": 1.0, "clip_grad": 0.0},
        max_tokens_per_micro_batch=32,
    )
    policy = Policy(folder, actor, seed=0)
    ((_, before),) = ((name, tensor.clone()) for name, tensor in policy.export_weights([NAME]))
    batch, passed = batch_of(samples()), list[int]()
    policy.on_forward = passed.append
    policy.update(batch, build_loss(config))
    assert sum(passed) == len(policy.share(batch.lengths)), "progress counts each response of this rank once"
    ((_, after),) = policy.export_weights([NAME])
    return (before - after).tolist()


def main(folder: str, out: str) -> None:
    initialize_distributed(120)
    rows = {
        f"{layout} {name}": gradient(Path(folder), layout, config)
        for layout in LAYOUTS
        for name, config in LOSSES.items()
    }
    if rank() == 0:
        Path(out).write_text(json.dumps(rows))
    barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])

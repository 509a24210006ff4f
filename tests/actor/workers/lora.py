"""Adapters after some updates under several layouts of four processes, one after another; and a checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megatron_tlt.actor.megatron_checkpoint import load_policy, save_policy
from megatron_tlt.actor.policy import Policy
from megatron_tlt.config.schema import ActorConfig
from megatron_tlt.platform.device import barrier, initialize_distributed, rank
from tests.helpers.samples import batch_of, log_probs_of_all
from tests.helpers.sequences import samples

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp4": {},
    "tp2pp2": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    "tp2 sequence": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "cp2 recomputed": {
        "context_parallel_size": 2,
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}
EXPERTS: dict[str, dict[str, Any]] = {
    "dp4": {},
    "ep2 tp2": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    },
    "ep4": {"expert_model_parallel_size": 4},
}
RANK, ALPHA, RATE, STEPS = 4, 8.0, 0.3, 3
VOCABULARY = 64


class PolicyGradient:
    """The plain policy gradient."""

    def denominator(self, inputs: Any) -> Any:
        return inputs.mask_BT.sum()

    def __call__(self, log_probs_BT: torch.Tensor, entropy_BT: torch.Tensor, inputs: Any) -> Any:
        log_probs_BT = torch.where(inputs.inside_BT, log_probs_BT, 0.0)
        loss = -(inputs.zero_outside().advantages_BT * log_probs_BT).sum()
        return loss, {"loss": loss.detach()}


def build(folder: Path, layout: dict[str, Any], targets: list[str]) -> Policy:
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    optimizer = {"optimizer": "sgd", "sgd_momentum": 0.0, "lr": RATE, "clip_grad": 1.0}
    lora = {"rank": RANK, "alpha": ALPHA, "targets": targets}
    actor = ActorConfig.model_validate(
        {
            "transformer_impl": "local",
            "megatron": layout,
            "optimizer": optimizer,
            "max_tokens_per_micro_batch": 64,
            "lora": lora,
        }
    )
    return Policy(folder, actor, seed=3)


def state(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.export_adapters()}


def main(model: str, kind: str, out: str) -> None:
    initialize_distributed(120)
    folder, targets = Path(model), ["attention", "mlp"] if kind == "dense" else ["attention", "experts"]
    batch, saved = batch_of(samples(VOCABULARY)), Path(out, "checkpoint")
    layouts = LAYOUTS if kind == "dense" else EXPERTS
    for number, (name, layout) in enumerate(layouts.items()):
        policy = build(folder, layout, targets)
        found = {f"first {key}": value for key, value in state(policy).items()}
        norms = []
        for step in range(STEPS):
            if number == 1 and step == STEPS - 1:
                if rank() == 0:
                    saved.mkdir()
                barrier()
                save_policy(policy, saved)
            norms.append(policy.update(batch, PolicyGradient())["grad_norm"])
        found |= state(policy)
        found["norms"] = torch.tensor(norms)
        found |= {f"merged {key}": value.clone() for key, value in policy.export_weights()}
        scores = log_probs_of_all(batch, policy.log_probs(batch, 1.0))
        found["scores"] = torch.tensor([value for one in scores for value in one])
        if rank() == 0:
            save_file(found, Path(out, f"{name}.safetensors"))
        if number == 1:
            other = build(folder, layouts["dp4"], targets)
            load_policy(other, saved)
            other.update(batch, PolicyGradient())
            resumed = state(other)
            if rank() == 0:
                save_file(resumed, Path(out, "resumed.safetensors"))
        barrier()


if __name__ == "__main__":
    main(*sys.argv[1:4])

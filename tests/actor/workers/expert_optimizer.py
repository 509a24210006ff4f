"""A mixture of experts' two optimizers, dense and expert parameters, with gradients written by hand."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim import NAdam

from megatron_tlt.actor.megatron_checkpoint import load_policy, save_policy
from megatron_tlt.actor.megatron_model import initialize_parallel_state
from megatron_tlt.actor.megatron_optimizer import build_optimizer, chosen_optimizer
from megatron_tlt.config.schema import ActorConfig
from megatron_tlt.platform.device import barrier, initialize_distributed, rank

LR, WEIGHT_DECAY = 1e-2, 0.1
ACTOR = ActorConfig(
    optimizer={"optimizer": "torch.optim.NAdam", "lr": LR, "weight_decay": WEIGHT_DECAY, "clip_grad": 0.0},
    optimizer_arguments={"momentum_decay": 0.1},
)


@dataclass
class Model:
    config: Any
    ddp_chunks: list[Any]


@dataclass
class Trained:
    """What of a policy a checkpoint holds."""

    model: Model
    optimizer: Any
    scheduler: Any


def build() -> Trained:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=2,
        num_moe_experts=4,
        moe_router_topk=2,
        expert_model_parallel_size=2,
        add_bias_linear=False,
    )
    spec = get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False)
    chunk = GPTModel(config=config, transformer_layer_spec=spec, vocab_size=64, max_sequence_length=32)
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), chunk)
    model = Model(config, [ddp])
    options: dict[str, Any] = {"total_steps": 8, "lr_decay_style": "constant", "min_lr_fraction": 0.0}
    return Trained(model, *build_optimizer(model, ACTOR, chosen_optimizer(ACTOR), **options))  # type: ignore[arg-type]


def gradients(trained: Trained, step: int) -> dict[str, torch.Tensor]:
    """The same on every rank that holds a parameter."""
    generator = torch.Generator().manual_seed(step)
    named = trained.model.ddp_chunks[0].named_parameters()
    return {name: torch.randn(p.shape, generator=generator) for name, p in named}


def train(trained: Trained, steps: range) -> None:
    for step in steps:
        given = gradients(trained, step)
        for name, p in trained.model.ddp_chunks[0].named_parameters():
            p.main_grad.copy_(given[name])
        trained.optimizer.step()
        trained.scheduler.step(1)


def weights(trained: Trained) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trained.model.ddp_chunks[0].named_parameters()}


def plain(trained: Trained, steps: range) -> dict[str, torch.Tensor]:
    start = {name: torch.nn.Parameter(tensor) for name, tensor in weights(trained).items()}
    matrices, vectors = ([p for p in start.values() if (p.dim() > 1) == wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = NAdam(groups, lr=LR, momentum_decay=0.1)
    for step in steps:
        given = gradients(trained, step)
        for name, p in start.items():
            p.grad = given[name]
        optimizer.step()
    return {name: p.detach() for name, p in start.items()}


def main(out: str) -> None:
    initialize_distributed(120)
    initialize_parallel_state({"expert_model_parallel_size": 2}, seed=0)
    trained = build()
    expected = plain(trained, range(3))
    train(trained, range(2))
    checkpoint = Path(out, "checkpoint")
    if rank() == 0:
        checkpoint.mkdir()
    barrier()
    save_policy(trained, checkpoint)  # type: ignore[arg-type]
    train(trained, range(2, 3))
    after = weights(trained)
    resumed = build()
    load_policy(resumed, checkpoint)  # type: ignore[arg-type]
    train(resumed, range(2, 3))
    row = {
        "optimizers": len(trained.optimizer.chained_optimizers),
        "difference": max(float((after[name] - expected[name]).abs().max()) for name in after),
        "resume_is_bit_equal": all(torch.equal(after[name], tensor) for name, tensor in weights(resumed).items()),
    }
    Path(out, f"rank{rank()}.json").write_text(json.dumps(row))
    barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])

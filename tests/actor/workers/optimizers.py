"""Trains one model with several optimizers under two processes, and resumes each from checkpoints."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_tlt.actor.megatron_checkpoint import load_policy, save_policy
from megatron_tlt.actor.policy import Policy
from megatron_tlt.algorithms.losses import negative_log_likelihood
from megatron_tlt.config.schema import ActorConfig
from megatron_tlt.platform.device import barrier, initialize_distributed, rank
from tests.actor.workers.layouts import batch, equal, weights_of

STEPS, WARMUP, WEIGHT_DECAY = 4, 6, 0.01
TENSOR_PARALLEL = {"tensor_model_parallel_size": 2}


@dataclass(frozen=True)
class Case:
    """What a user writes, and what that means to torch."""

    name: str
    lr: float
    arguments: dict[str, Any] = field(default_factory=dict)
    megatron: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    model: str = "dense"
    torch_name: str = ""
    torch_arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def reference(self) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        path = self.torch_name or self.name
        return getattr(torch.optim, path.rpartition(".")[2]), {**self.arguments, **self.torch_arguments}


BUCKETS = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 20000}
CASES = {
    "adam": Case("adam", 1e-3, torch_name="AdamW", torch_arguments={"betas": (0.9, 0.999)}),
    "sgd": Case("sgd", 0.3, torch_name="SGD", torch_arguments={"momentum": 0.9}),
    "sgd-dampened": Case("torch.optim.SGD", 0.3, {"momentum": 0.9, "dampening": 0.5}),
    "radam": Case("torch.optim.RAdam", 1e-2, {"betas": [0.8, 0.95], "decoupled_weight_decay": True}),
    "nadam-buckets": Case("torch.optim.NAdam", 1e-3, ddp=BUCKETS),
    "adagrad": Case("torch.optim.Adagrad", 1e-2, {"initial_accumulator_value": 0.1, "lr_decay": 0.1}),
    "rmsprop": Case("torch.optim.RMSprop", 1e-3, {"centered": True, "momentum": 0.5}),
    # dense and expert parameters have an optimizer each
    "nadam-experts": Case("torch.optim.NAdam", 1e-3, megatron={"expert_model_parallel_size": 2}, model="moe"),
    "nadam-bf16": Case("torch.optim.NAdam", 1e-3, megatron={"bf16": True}),
}
RESHARDED = ("sgd", "nadam-buckets", "adagrad")


def policy_of(folder: Path, case: Case, **megatron: Any) -> Policy:
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    actor = ActorConfig(
        transformer_impl="local",
        megatron={**case.megatron, **megatron},
        ddp=case.ddp,
        optimizer={"optimizer": case.name, "lr": case.lr, "weight_decay": WEIGHT_DECAY},
        optimizer_arguments=case.arguments,
        lr_warmup_steps=WARMUP,
    )
    return Policy(folder / case.model, actor, seed=0, total_steps=8)


def train(policy: Policy, steps: int) -> list[float]:
    return [policy.update(batch(), negative_log_likelihood)["loss"] for _ in range(steps)]


def save(policy: Policy, folder: Path) -> Path:
    if rank() == 0:
        folder.mkdir()
    barrier()
    save_policy(policy, folder)
    return folder


def resumed(model: Path, checkpoint: Path, case: Case, **megatron: Any) -> Policy:
    policy = policy_of(model, case, **megatron)
    load_policy(policy, checkpoint)
    return policy


def run(model: Path, out: Path, name: str) -> dict[str, Any]:
    case = CASES[name]
    policy = policy_of(model, case)
    fresh = save(policy, out / f"{name}-0")
    losses = train(policy, 1)
    after_one = weights_of(policy)
    losses += train(policy, 1)
    halfway = save(policy, out / f"{name}-2")
    losses += train(policy, STEPS - 2)
    after_all = weights_of(policy)

    again = resumed(model, fresh, case)
    train(again, 1)
    row = {"losses": losses, "fresh_is_bit_equal": equal(after_one, weights_of(again))}
    # a policy that has stepped forgets its own state
    load_policy(again, halfway)
    train(again, STEPS - 2)
    row["resume_is_bit_equal"] = equal(after_all, weights_of(again))
    if name in RESHARDED:
        row["resharded_losses"] = train(resumed(model, halfway, case, **TENSOR_PARALLEL), STEPS - 2)
    return row


def main(model: str, out: str) -> None:
    initialize_distributed(120)
    rows = {name: run(Path(model), Path(out), name) for name in CASES}
    if rank() == 0:
        Path(out, "rows.json").write_text(json.dumps(rows))
    barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The same three steps with and without giving up the memory in between, on storages that are really freed."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from megatron_tlt.actor.batches import MicroBatch
from megatron_tlt.actor.megatron_offload import PhaseOffload
from megatron_tlt.actor.policy import Policy
from megatron_tlt.algorithms.losses import negative_log_likelihood
from megatron_tlt.config.schema import ActorConfig
from megatron_tlt.platform.device import initialize_distributed
from tests.actor.workers.layouts import batch, equal, weights_of
from tests.helpers import put_back

WHOLE = {"optimizer": "torch.optim.AdamW"}
"""Its owners step whole tensors, and keep a gradient and a float32 copy of each of their own."""


def run(folder: Path, options: dict[str, object], *, offloaded: bool, whole: bool = False) -> dict[str, torch.Tensor]:
    actor = ActorConfig(
        transformer_impl="local",
        optimizer={"lr": 1e-3, **(WHOLE if whole else {})},
        optimizer_sharding="tensor" if whole else "auto",
        megatron=options,
    )
    policy = Policy(folder, actor, seed=0)
    memory = PhaseOffload(policy.model, policy.optimizer, enabled=offloaded)
    for _ in range(3):
        policy.update(batch(), negative_log_likelihood)
        freed = memory.offload()
        parameters = [p for chunk in policy.model.chunks for p in chunk.parameters()]
        sizes = {parameter.untyped_storage().nbytes() for parameter in parameters}
        weights = sum(parameter.numel() for parameter in parameters)
        if offloaded:
            # parameters, 4-byte gradients, two moments, and in bf16 the main weights
            least = weights * ((2 + 4 + 8 + 4 if options else 4 + 4 + 8) + whole * (4 if options else 8))
            assert sizes == {0} and freed >= least, (sizes, freed, least)
        else:
            assert 0 not in sizes and freed == 0
        memory.reload()
    return weights_of(policy)


def logits_dtype(folder: Path, options: dict[str, object]) -> torch.dtype:
    """Of the logits that scores and losses are computed from."""
    policy, found = Policy(folder, ActorConfig(transformer_impl="local", megatron=options), seed=0), []
    micro_batches = policy.micro_batches(batch())

    def collect(micro_batch: MicroBatch, logits_RTV: torch.Tensor, non_loss_data: bool = False) -> torch.Tensor:
        found.append(logits_RTV.dtype)
        return logits_RTV

    policy.run_schedule(micro_batches, collect, forward_only=True)
    return found[0]


def main(folder: str) -> None:
    put_back.install_from_environment()
    initialize_distributed()
    # widened as a whole they would take twice the memory, and as much again for their gradient
    assert logits_dtype(Path(folder), {"bf16": True}) == torch.bfloat16
    for name, options in (("float32", {}), ("bf16", {"bf16": True})):
        for whole in (False, True):
            plain, moved = (run(Path(folder), options, offloaded=offloaded, whole=whole) for offloaded in (False, True))
            print(f"{name}{', whole tensors' * whole}: {'same' if equal(plain, moved) else 'different'}")


if __name__ == "__main__":
    main(*sys.argv[1:])

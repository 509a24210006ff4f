"""Compares replicas under several layouts on four processes: after updates, and after one rank flipped one bit."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from megatron_tlt.actor.megatron_replicas import ReplicaComparison
from megatron_tlt.algorithms.losses import negative_log_likelihood
from megatron_tlt.config.integrity import IntegrityConfig
from megatron_tlt.config.lora import LoraConfig
from megatron_tlt.errors import RunError
from megatron_tlt.platform.collectives import all_gather_data
from megatron_tlt.platform.device import barrier, initialize_distributed, rank
from megatron_tlt.trainer.integrity import ReplicaCheck
from tests.actor.workers.layouts import CP2, EP2, TP2SP, batch, policy_of

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp4": {},
    "dp4-overlap": {},
    "dp4-bf16": {"bf16": True},
    "dp4-lora": {},
    "tp2dp2": TP2SP,
    "cp2dp2": CP2,
    "moe-ep2": EP2,
    "moe-ep4": {"expert_model_parallel_size": 4},
}
FLIPPED_BY = 2
STEP = 3


def flip_a_bit(parameter: torch.Tensor) -> None:
    words = parameter.detach().view(-1).view(torch.int16 if parameter.element_size() == 2 else torch.int32)
    words[words.numel() // 2] ^= 1


def main(folder: str, out: str) -> None:
    initialize_distributed(120)
    rows: dict[str, Any] = {}
    for name, megatron in LAYOUTS.items():
        lora = LoraConfig() if name.endswith("-lora") else None
        policy = policy_of(Path(folder), name, megatron=megatron, lora=lora, lr_warmup_steps=0)
        for _ in range(2):
            policy.update(batch(), negative_log_likelihood)
        comparison = ReplicaComparison(policy)
        row: dict[str, Any] = {"equal": len(comparison.run()) == 0, "experts_compared": comparison.experts_compared}
        check = ReplicaCheck(IntegrityConfig(replicas_every=1), policy)
        row["ms"] = statistics.median(check.after_update(STEP)["integrity/replicas_ms"] for _ in range(5))
        named = [*comparison._dense, *comparison._experts]
        row["tensors"], row["bytes"] = len(named), sum(parameter.nbytes for _, parameter in named)
        for kind, part in (("dense", comparison._dense), ("experts", comparison._experts)):
            if not part:
                continue
            tensor, parameter = part[len(part) // 2]
            before = parameter.detach().clone()
            if rank() == FLIPPED_BY:
                flip_a_bit(parameter.data)
            odd = {str(r): [found.tensors, found.proven] for r, found in comparison.run().items()}
            row[kind] = {"tensor": all_gather_data(tensor, str)[FLIPPED_BY], "odd": odd, "errors": errors(check)}
            parameter.data.copy_(before)
        rows[name] = row
    if rank() == 0:
        Path(out, "rows.json").write_text(json.dumps(rows))
    barrier()


def errors(check: ReplicaCheck) -> list[str]:
    """What each rank raises, after the update and before a save."""
    found = []
    for compare in (check.after_update, check.before_save):
        try:
            compare(STEP)
            found.append("")
        except RunError as error:
            found.append(str(error))
    return sorted({message for messages in all_gather_data(found, list[str]) for message in messages})


if __name__ == "__main__":
    main(*sys.argv[1:])

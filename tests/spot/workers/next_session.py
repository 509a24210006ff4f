"""A session on two ranks, led by the second, from the newest checkpoint; each writes its initial state."""

from __future__ import annotations

import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from megatron_tlt.checkpoint.payload import STATE, write_payload
from megatron_tlt.config.drafter import DrafterConfig
from megatron_tlt.drafter.checkpoint import KIND, payload_of, state_of
from megatron_tlt.drafter.folder import drafter_from_target
from megatron_tlt.drafter.training import DrafterTrainer
from megatron_tlt.platform.rank_group import WholeGroup
from megatron_tlt.spot.checkpointer import newest

CONFIG = DrafterConfig(kind="eagle", lr=1e-2, warmup_steps=3, weight_decay=0.01, unroll_steps=1)
LEADER = 1


def main(target: str, checkpoints: str, out: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=90))
    rank = dist.get_rank()
    trainer = DrafterTrainer(drafter_from_target(Path(target), "eagle", seed=5 + rank), CONFIG, 0)
    if rank == LEADER:
        found = newest(Path(checkpoints), KIND)
        assert found is not None
        trainer.load_state(state_of(found.payload)[0])
    group = WholeGroup()
    trainer.synchronize(LEADER, group)
    payload = payload_of(trainer.state, {})
    folder = Path(out) / f"rank{rank}"
    folder.mkdir()
    tensors = {name: tensor.contiguous() for name, tensor in payload.tensors.items()}
    write_payload(folder / STATE, replace(payload, tensors=tensors))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

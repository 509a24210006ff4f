"""Two ranks train one drafter on unequal shares; each writes its result to rank<r>.safetensors and .json."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from megatron_tlt.config.drafter import DrafterBufferConfig, DrafterConfig
from megatron_tlt.drafter.buffer import DataBuffer
from megatron_tlt.drafter.entry import Entry
from megatron_tlt.drafter.folder import drafter_from_target
from megatron_tlt.drafter.session import train_session
from megatron_tlt.drafter.training import DrafterTrainer
from megatron_tlt.errors import TltError
from megatron_tlt.platform.rank_group import WholeGroup
from tests.drafter.conftest import load_target, random_entry

CONFIG = DrafterConfig(
    kind="eagle", optimizer="torch.optim.SGD", lr=0.5, clip_grad=0.5, warmup_steps=2, feature_noise=0.05, unroll_steps=2
)


def batches(target_folder: Path) -> list[list[Entry]]:
    """Batches for three steps, of unequal sequences."""
    target = load_target(target_folder)
    return [
        [random_entry(target, "eagle", 8 + 5 * i, 2 + i, seed=10 * step + i) for i in range(5)] for step in range(3)
    ]


def share(batch: list[Entry], rank: int, step: int) -> list[Entry]:
    """Rank 0's share: one entry in the first step, three in the second, all in the third."""
    cut = (1, 3, 5)[step]
    return batch[:cut] if rank == 0 else batch[cut:]


def main(target: str, out: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=90))
    rank, folder = dist.get_rank(), Path(target)
    # rank 1 joins late: its drafter differs and has no optimizer state
    trainer = DrafterTrainer(drafter_from_target(folder, "eagle", seed=rank), CONFIG, 0)
    group = WholeGroup()
    trainer.synchronize(0, group)
    every = batches(folder)
    results = [trainer.train_step(share(batch, rank, step), group=group) for step, batch in enumerate(every)]
    tensors = {name: tensor.clone() for name, tensor in trainer.state.parameters.items()}

    buffer = DataBuffer(Path(out) / f"buffer{rank}", DrafterBufferConfig(), seed=0)
    for entry in share(every[0], rank, 0):
        buffer.add(entry)
    asked = iter([False, False, rank == 1])
    session = train_session(trainer, buffer, 0, 2, 10, should_stop=lambda: next(asked), group=group)
    version = trainer.version
    good = {name: tensor.clone() for name, tensor in trainer.state.parameters.items()}
    narrow = Entry("narrow", 0, torch.arange(9, dtype=torch.int32), 2, torch.zeros(9, 32), 0.0)
    try:
        trainer.train_step(every[0] if rank == 0 else [every[0][0], narrow], group=group)
        raised = ""
    except TltError as error:
        raised = f"{type(error).__name__}: {error}"
    broken = every[0][0]
    if rank == 1:
        broken = Entry("nan", 0, broken.token_ids, broken.prompt_length, broken.hidden * float("nan"), 0.0)
    failed = trainer.train_step([broken], group=group)
    kept = all(torch.equal(tensor, good[name]) for name, tensor in trainer.state.parameters.items())

    save_file(tensors, Path(out) / f"rank{rank}.safetensors")
    record = {
        "metrics": [result.metrics for result in results],
        "session": [session.outcome, session.steps, version],
        "raised": raised,
        "failed": [failed.outcome, kept],
    }
    (Path(out) / f"rank{rank}.json").write_text(json.dumps(record))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

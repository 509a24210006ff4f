"""Builds an engine over all ranks for each model folder and writes which slices each rank holds."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from megatron_tlt.rollout.vllm_engine import VllmEngine
from tests.rollout.conftest import ROLLOUT, SPECULATION


def main(root: str, out: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=90))
    rollout = ROLLOUT.model_copy(update={"tensor_parallel_size": dist.get_world_size()})
    held = {}
    for folder in sorted(Path(root).iterdir()):
        engine = VllmEngine(folder, rollout, SPECULATION, seed=7)
        held[folder.name] = [
            (name, list(tensor.shape), None if part is None else [part.dim, part.start, part.length])
            for name, tensor, part in engine.read_weights()
        ]
        engine.shutdown()
    Path(out, f"rank{dist.get_rank()}.json").write_text(json.dumps(held))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

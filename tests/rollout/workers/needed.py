"""Builds an engine over all ranks for each model folder and writes which slices each rank holds."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_tlt.rollout.vllm_engine import VllmEngine
from tests.rollout.conftest import ROLLOUT, SPECULATION


def held(folder: Path, expert_parallel: bool) -> list[Any]:
    """(name, shape of the rank's part, its dim, start and length; None where it is the whole tensor)."""
    options = {"enable_expert_parallel": True} if expert_parallel else {}
    rollout = ROLLOUT.model_copy(
        update={"tensor_parallel_size": dist.get_world_size(), "vllm": {**ROLLOUT.vllm, **options}}
    )
    engine = VllmEngine(folder, rollout, SPECULATION, seed=7)
    found = [
        (name, list(tensor.shape), None if part is None else [part.dim, part.start, part.length])
        for name, tensor, part in engine.read_weights()
    ]
    engine.shutdown()
    return found


def mixture(folder: Path) -> bool:
    return "_experts" in (folder / "config.json").read_text()


def main(root: str, out: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=90))
    record = {}
    # Mixtures first: vLLM makes groups once in a process, and those of experts only where the first model has some.
    for folder in sorted(Path(root).iterdir(), key=lambda folder: (not mixture(folder), folder.name)):
        record[f"{folder.name} tp"] = held(folder, False)
        if folder.name == "qwen3-moe" and dist.get_world_size() > 1:
            record[f"{folder.name} ep"] = held(folder, True)
    Path(out, f"rank{dist.get_rank()}.json").write_text(json.dumps(record))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

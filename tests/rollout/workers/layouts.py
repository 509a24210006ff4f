"""One engine over all ranks for each model and layout: what ranks read, and greedy decoding before and after a load.

Writes ``rank<r>.json``: per "model layout" the slices of each tensor and the tokens of both generations.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megatron_tlt.rollout.types import Request, SamplingSpec
from megatron_tlt.rollout.vllm_engine import VllmEngine
from tests.rollout.conftest import ROLLOUT, SPECULATION

PROMPTS = [(5, 9, 7) * 4, (1, 2, 3, 4, 5, 6), (8, 8, 11) * 3]
SCALE = 1.25  # of the weights that are loaded


def generate(engine: VllmEngine) -> list[list[int]]:
    greedy = SamplingSpec(temperature=0.0, max_tokens=24)
    requests = [Request(str(i), prompt, greedy, seed=0) for i, prompt in enumerate(PROMPTS)]
    return [list(response.token_ids) for response in engine.generate(requests)]


def examine(folder: Path, expert_parallel: bool) -> dict[str, Any]:
    rollout = ROLLOUT.model_copy(
        update={
            "tensor_parallel_size": dist.get_world_size(),
            "vllm": {**ROLLOUT.vllm, "enable_expert_parallel": expert_parallel},
        }
    )
    engine = VllmEngine(folder, rollout, SPECULATION, seed=7)
    state = load_file(folder / "model.safetensors")
    slices: dict[str, list[int] | None] = {}
    for name, tensor, shard in engine.read_weights():
        assert torch.equal(tensor, state[name] if shard is None else shard.of(state[name])), (folder.name, name)
        assert name not in slices, name
        slices[name] = None if shard is None else [shard.dim, shard.start, shard.length]
    before = generate(engine)
    engine.load_weights((name, tensor * SCALE) for name, tensor in state.items())
    for name, tensor, shard in engine.read_weights():
        full = state[name] * SCALE
        assert torch.equal(tensor, full if shard is None else shard.of(full)), (folder.name, name)
    after = generate(engine)
    engine.shutdown()
    return {"slices": slices, "before": before, "after": after}


def main(root: str, out: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    records = {}
    for folder in sorted(Path(root).iterdir()):
        records[f"{folder.name} tp"] = examine(folder, False)
        if any(".experts." in name for name in records[f"{folder.name} tp"]["slices"]):
            records[f"{folder.name} ep"] = examine(folder, True)
    (Path(out) / f"rank{dist.get_rank()}.json").write_text(json.dumps(records))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

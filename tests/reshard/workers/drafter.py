"""One rank of engines with an EAGLE head: a newer head, which only the last rank has, reaches every engine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from megatron_tlt.config.schema import ModelConfig, ReshardConfig, TltConfig
from megatron_tlt.config.speculation import SpeculationConfig
from megatron_tlt.config.task import TaskConfig
from megatron_tlt.errors import RunError
from megatron_tlt.platform.device import barrier, initialize_distributed, prepare, rank, world_size
from megatron_tlt.rollout.types import Request, SamplingSpec
from megatron_tlt.rollout.vllm_engine import VllmEngine
from megatron_tlt.trainer.synchronization import drafter_sync
from tests.rollout.conftest import ROLLOUT


def said(engine: VllmEngine) -> tuple[list[list[int]], list[int]]:
    """Greedy responses, and how many draft tokens were accepted in each."""
    sampling = SamplingSpec(temperature=0.0, max_tokens=60)
    prompts = [(3 * i % 61, 7 * i % 59, i) for i in range(1, 25)]
    responses = engine.generate([Request(str(i), prompt, sampling, seed=0) for i, prompt in enumerate(prompts)])
    return [list(r.token_ids) for r in responses], [r.draft.num_accepted_tokens for r in responses]


def main(model_folder: str, old: str, new: str, engine_tp: str, out: str) -> None:
    prepare()
    initialize_distributed(120)
    tensors = load_file(Path(new, "model.safetensors"))
    config = TltConfig(
        model=ModelConfig(path=Path(model_folder)),
        tasks=[TaskConfig(name="gcd")],
        rollout=ROLLOUT.model_copy(update={"tensor_parallel_size": int(engine_tp)}),
        speculation=SpeculationConfig(drafter="eagle", path=Path(old), num_speculative_tokens=3),
        reshard=ReshardConfig(staging_mb=0.25),
    )
    engine = VllmEngine(Path(model_folder), config.rollout, config.speculation, seed=7)
    before = said(engine)

    def newest() -> dict[str, torch.Tensor]:
        return tensors if rank() == world_size() - 1 else {}

    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    report = drafter_sync(config, newest, shapes, engine).sync(version=5, verify=True)
    assert engine.versions == {"policy": 0, "drafter": 5}
    assert report.verified_tensors == len(tensors)
    for name, view, part in engine.read_drafter_weights():
        whole = tensors[name]
        assert torch.equal(view, whole if part is None else whole.narrow(part.dim, part.start, part.length)), name
    after = said(engine)

    lost = drafter_sync(config, dict, shapes, engine)
    try:
        lost.sync(version=6, verify=True)
        raise AssertionError("a drafter that nobody has was taken")
    except RunError as error:
        assert "rank 0 needs it, but no rank holds it (drafter to engines" in str(error), error
    assert engine.versions["drafter"] == 5, "nothing was written, so the engine may go on"
    record: dict[str, Any] = {"tokens": [before[0], after[0]], "accepted": [before[1], after[1]]}
    Path(out, f"rank{rank()}.json").write_text(json.dumps(record), encoding="utf-8")
    barrier()
    engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])

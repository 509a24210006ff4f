"""One engine over two ranks with a drafter model: dummy weights at first, then the policy's written slice by slice.

Writes ``rank<r>.json``: the greedy tokens, and how many drafts were accepted.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megatron_tlt.config.speculation import SpeculationConfig
from megatron_tlt.errors import RunError
from megatron_tlt.rollout.types import Request, SamplingSpec
from megatron_tlt.rollout.vllm_engine import VllmEngine
from tests.rollout.conftest import ROLLOUT
from tests.rollout.workers.layouts import PROMPTS


def main(model_folder: str, head: str, out: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    vllm = {**ROLLOUT.vllm, "load_format": "dummy"}
    rollout = ROLLOUT.model_copy(update={"tensor_parallel_size": 2, "vllm": vllm})
    speculation = SpeculationConfig(drafter=Path(head).name, path=Path(head), num_speculative_tokens=3)
    engine = VllmEngine(Path(model_folder), rollout, speculation, seed=7)
    greedy = SamplingSpec(temperature=0.0, max_tokens=48)
    requests = [Request(str(i), prompt, greedy, seed=0) for i, prompt in enumerate(PROMPTS)]
    assert engine.versions == {"policy": None, "drafter": 0}
    try:
        engine.generate(requests)
        raise AssertionError("it generated from dummy weights")
    except RunError as error:
        assert "the policy's weights are not completely loaded (last version: none)" in str(error), error

    state = load_file(Path(head) / "model.safetensors")
    seen = set()
    for name, tensor, shard in engine.read_drafter_weights():
        assert torch.equal(tensor, state[name] if shard is None else shard.of(state[name])), name
        seen.add(name)
    assert seen == state.keys()

    state = load_file(Path(model_folder) / "model.safetensors")
    engine.begin_update("policy")
    for name, tensor, shard in engine.read_weights():
        tensor.copy_(state[name] if shard is None else shard.of(state[name]))
    engine.finish_update("policy", 3)
    assert engine.versions == {"policy": 3, "drafter": 0}
    responses = engine.generate(requests)
    record = {
        "tokens": [list(response.token_ids) for response in responses],
        "accepted": [response.draft.num_accepted_tokens for response in responses],
    }
    (Path(out) / f"rank{dist.get_rank()}.json").write_text(json.dumps(record))
    engine.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Two ranks with an engine each (tp 1) or one for both (tp 2), in a group that outlives them; writes rank<r>.json."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_tlt.rollout.vllm_engine import VllmEngine
from tests.helpers.tiny_models import load_qwen2
from tests.rollout.conftest import ROLLOUT, SPECULATION
from tests.rollout.test_engine import mixed_requests, outcome


def main(model_folder: str, other_folder: str, out: str, tp: int) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=90))
    rank = dist.get_rank()
    engine = VllmEngine(
        Path(model_folder), ROLLOUT.model_copy(update={"tensor_parallel_size": tp}), SPECULATION, seed=7
    )
    requests = mixed_requests()
    if tp == 1:  # different loads: one rank ends long before the other and must not wait for it
        requests = requests[:2] if rank == 0 else requests[2:]
    before = outcome(engine.generate(requests))

    state = load_qwen2(Path(other_folder)).state_dict()
    engine.load_weights(state.items())
    shards = {}
    for name, tensor, shard in engine.read_weights():
        expected = state[name] if shard is None else shard.of(state[name])
        assert torch.equal(tensor, expected), name
        shards[name] = None if shard is None else [shard.dim, shard.start, shard.length]
    after = outcome(engine.generate(requests))

    engine.shutdown()
    total = torch.ones(1)
    dist.all_reduce(total)  # the group is still there
    record = {"before": before, "after": after, "shards": shards, "sum": float(total)}
    (Path(out) / f"rank{rank}.json").write_text(json.dumps(record))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]))

"""One rank of a supervised warm-up; rank 0 writes losses, seconds and the bytes that the optimizer keeps."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_tlt.actor.policy import Policy
from megatron_tlt.actor.whole_tensors import WholeTensorOptimizer
from megatron_tlt.config.loader import load_config
from megatron_tlt.data.tokenizer import load_tokenizer
from megatron_tlt.platform.device import barrier, initialize_distributed, prepare, rank, seed_everything
from megatron_tlt.platform.files import atomic_write_text
from megatron_tlt.platform.processes import die_with_parent
from megatron_tlt.tasks.mixture import build_sources
from megatron_tlt.trainer.supervised import warm_up, write_start


def _kept(policy: Policy) -> Iterator[torch.Tensor]:
    """The tensors of the optimizer's state on this rank, without copies of weights."""
    if isinstance(policy.optimizer, WholeTensorOptimizer):
        for part in policy.optimizer.parts:
            masters = {master.data_ptr() for master in part.masters.values()}
            yield from (tensor for tensor in part.tensors() if tensor.data_ptr() not in masters)
        return
    for wrapper in policy.optimizer.chained_optimizers:
        for state in wrapper.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor) and value.dim())


def main(config_file: str, overrides: str, folder: str, out: str) -> None:
    die_with_parent(signal.SIGKILL)
    config = load_config(Path(config_file), json.loads(overrides))
    recipe = config.model.recipe
    assert recipe is not None
    prepare(config.actor.tensor_parallel_size, config.run.deterministic)
    initialize_distributed(config.launcher.collective_timeout_s)
    seed_everything(recipe.seed)
    problems = build_sources([task.without_pool for task in config.tasks], "train", config.run.seed)
    start = Path(folder)
    if rank() == 0 and not (start / "config.json").is_file():
        start.mkdir(parents=True, exist_ok=True)
        write_start(config, problems, start)
    barrier()
    rows: dict[str, list[float]] = {"losses": [], "seconds": []}
    began = time.perf_counter()

    def record(metrics: dict[str, float]) -> None:
        rows["losses"].append(metrics["loss"])
        rows["seconds"].append(time.perf_counter() - began)

    policy = warm_up(config, problems, load_tokenizer(start), start, record)
    weights = sum(tensor.numel() for _, tensor in policy.export_weights())
    kept = torch.tensor(sum(tensor.nbytes for tensor in _kept(policy)), dtype=torch.int64)
    dist.all_reduce(kept)
    found: dict[str, Any] = {**rows, "state_bytes": int(kept), "weights": weights}
    if rank() == 0:
        atomic_write_text(Path(out), json.dumps(found))
    barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])

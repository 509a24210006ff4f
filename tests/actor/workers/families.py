"""Scores the same samples with each model below one folder; writes log-probs and whether weights came back equal."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from megatron_tlt.actor.policy import Policy
from megatron_tlt.config.schema import ActorConfig
from megatron_tlt.platform.device import barrier, initialize_distributed, rank, world_size
from tests.actor.workers.layouts import TEMPERATURE, samples


def stored(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def main(root: str, out: str) -> None:
    initialize_distributed(120)
    half = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    actor = ActorConfig(transformer_impl="local", megatron=half if world_size() == 4 else {}, optimizer={"lr": 1e-3})
    rows: dict[str, Any] = {}
    for folder in sorted(Path(root).iterdir()):
        policy = Policy(folder, actor, seed=0, trainable=False)
        expected = stored(folder)
        exported = dict(policy.export_weights())
        rows[folder.name] = {
            "log_probs": [scores.log_probs for scores in policy.log_probs(samples(), TEMPERATURE)],
            "roundtrip_bit_equal": exported.keys() == expected.keys()
            and all(torch.equal(exported[name], tensor) for name, tensor in expected.items()),
        }
    if rank() == 0:
        Path(out).write_text(json.dumps(rows))
    barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])

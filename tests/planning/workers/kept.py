"""What autograd keeps of Megatron's layers: bytes of one micro-batch in one layer, for each case, to a file."""

from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from megatron_tlt.actor.policy import Policy
from megatron_tlt.algorithms.losses import negative_log_likelihood
from megatron_tlt.bench.tiny_models import write_tiny_model
from megatron_tlt.config.schema import ActorConfig
from megatron_tlt.data.rollout_batch import RolloutBatch
from megatron_tlt.platform.device import initialize_distributed
from megatron_tlt.platform.files import atomic_write_text


def kept_bytes(family: str, megatron: dict[str, Any], sizes: dict[str, int], layers: int, tokens: int) -> int:
    """Storages that an update of one sequence keeps for its backward pass, parameters left out."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(family, Path(folder), num_hidden_layers=layers, **sizes)
        actor = ActorConfig(transformer_impl="local", megatron=megatron, max_tokens_per_micro_batch=2 * tokens)
        policy = Policy(model, actor, seed=0)
    own = {p.untyped_storage().data_ptr() for chunk in policy.model.chunks for p in chunk.parameters()}
    # held on to, so that no address is given out twice; what backward computes again is not kept
    storages: dict[int, torch.UntypedStorage] = {}
    forward = True

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if forward and storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage
        return tensor

    def give_back(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal forward
        forward = False
        return tensor

    rng = random.Random(0)
    batch = RolloutBatch.of_sequences([[rng.randrange(64) for _ in range(tokens + 1)]], [3])
    with torch.autograd.graph.saved_tensors_hooks(keep, give_back):
        policy.update(batch, negative_log_likelihood)
    return sum(storage.nbytes() for storage in storages.values())


def main(given: str, out: str) -> None:
    initialize_distributed(120)
    values = json.loads(given)
    found = {}
    for name, case in values["cases"].items():
        few, more = (
            kept_bytes(case["family"], case["megatron"], values["sizes"], layers, values["tokens"]) for layers in (1, 3)
        )
        found[name] = (more - few) / 2
    atomic_write_text(Path(out), json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])

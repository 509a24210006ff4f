"""One rank of a layout: logits of all tiny models in a folder against transformers, and a round trip of weights."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron_tlt.actor.batches import MicroBatch
from megatron_tlt.actor.policy import Policy
from megatron_tlt.bench.workers.layout import random_samples
from megatron_tlt.config.schema import ActorConfig
from megatron_tlt.data.rollout_batch import RolloutBatch
from megatron_tlt.models.families import FAMILIES
from megatron_tlt.models.hf_folder import read_hf_config
from megatron_tlt.platform.collectives import all_gather_data
from megatron_tlt.platform.device import barrier, initialize_distributed, rank
from megatron_tlt.platform.files import atomic_write_text
from megatron_tlt.platform.processes import die_with_parent


def _differences(policy: Policy, folder: Path, samples: RolloutBatch) -> list[float]:
    """For each sequence the largest difference of logits over the largest logit; none if another stage has them."""
    from megatron.core import parallel_state

    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    size = parallel_state.get_tensor_model_parallel_world_size()
    worst: list[float] = []

    def compare(batch: MicroBatch, share_RTV: torch.Tensor, non_loss_data: bool = True) -> None:
        shares = [torch.empty_like(share_RTV) for _ in range(size)]
        dist.all_gather(shares, share_RTV.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
        logits_RTV = torch.cat(shares, dim=-1)[..., : reference.config.vocab_size]
        for i, start in zip(batch.indices, batch.cu_seqlens, strict=False):
            tokens = samples.tokens(i)[:-1].long()
            expected = reference(tokens[None]).logits[0]
            found = logits_RTV[0, start : start + len(tokens)]
            worst.append(float((found - expected).abs().max() / expected.abs().max()))

    with torch.no_grad():
        policy.run_schedule(policy.micro_batches(samples), compare, forward_only=True)
    return worst


def _layout(folder: Path, megatron: dict[str, Any]) -> dict[str, Any]:
    """The layout without the keys of experts if the model has none."""
    if FAMILIES[read_hf_config(folder).model_type].experts:
        return megatron
    return {key: value for key, value in megatron.items() if not key.startswith("expert_")}


def main(root: str, megatron: str, out: str) -> None:
    from megatron.core import parallel_state

    die_with_parent(signal.SIGKILL)
    initialize_distributed(120)
    samples = random_samples()
    rows: dict[str, Any] = {}
    for folder in sorted(Path(root).iterdir()):
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        actor = ActorConfig(transformer_impl="local", megatron=_layout(folder, json.loads(megatron)))
        policy = Policy(folder, actor, seed=0, trainable=False)
        stored, exported = load_file(folder / "model.safetensors"), dict(policy.export_weights())
        ranks = all_gather_data(_differences(policy, folder, samples), list[float])
        rows[folder.name] = {
            "logits": max(difference for differences in ranks for difference in differences),
            "roundtrip_bit_equal": exported.keys() == stored.keys()
            and all(torch.equal(exported[name], tensor) for name, tensor in stored.items()),
        }
    if rank() == 0:
        atomic_write_text(Path(out), json.dumps(rows))
    barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Builds the actor of every launch config given, on each pipeline stage, with tensors that have no memory.

Of each stage the bytes of weights and gradients, and of dense models what autograd keeps of the first stage's layers
for one micro-batch; to a file. torch's ``fake`` backend stands for the other ranks. The layers are Megatron-Core's own:
Transformer Engine needs a GPU.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_tlt.actor import megatron_model
from megatron_tlt.actor.megatron_config import _LAYOUT_KEYS, transformer_config
from megatron_tlt.actor.megatron_layers import RMSNorm, packed_seq_params
from megatron_tlt.actor.megatron_lora import add_adapters
from megatron_tlt.config.loader import load_config
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.models.hf_folder import read_architecture
from megatron_tlt.models.weight_map import WeightMap

# isort: split
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

SEQUENCES = 8


class FusedNorm(torch.autograd.Function):
    """Keeps what CUDA's kernel of RMSNorm keeps, its input; on a CPU torch composes it of float32 operations."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def start_rank(config: TltConfig, stage: int, stages: int) -> None:
    """Makes this process the first rank of a pipeline stage."""
    world = config.launcher.world_size
    dist.init_process_group("fake", store=FakeStore(), rank=stage * (world // stages), world_size=world)
    sizes = {key: config.actor.megatron[key] for key in _LAYOUT_KEYS if key in config.actor.megatron}
    parallel_state.initialize_model_parallel(**sizes, create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    # it compares random states, which have no values here
    get_cuda_rng_tracker().fork = lambda *names: contextlib.nullcontext()


def end_rank() -> None:
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def kept_bytes(chunk: Any, tokens: int, ranks: int) -> int:
    """Storages that autograd keeps of a chunk's layers for one packed micro-batch, weights left out."""
    own = {p.untyped_storage()._cdata for p in chunk.parameters()}
    storages: dict[int, Any] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            storages[storage._cdata] = storage
        return tensor

    length = tokens // SEQUENCES
    ids = torch.zeros(1, SEQUENCES * length // ranks, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = chunk.embedding(ids, ids)
        chunk.decoder(
            hidden_states=hidden,
            attention_mask=None,
            rotary_pos_emb=chunk.rotary_pos_emb(length, packed_seq=True),
            packed_seq_params=packed_seq_params([i * length for i in range(SEQUENCES + 1)]),
        )
    return sum(int(storage.nbytes()) for storage in storages.values())


def rows_of(path: Path) -> list[dict[str, Any]]:
    config = load_config(path, check_libraries=False)
    actor = config.actor.model_copy(update={"transformer_impl": "local"})
    assert config.model.architecture is not None
    hf_config = read_architecture(config.model.architecture, str(path))
    stages = actor.megatron.get("pipeline_model_parallel_size", 1)
    rows = []
    for stage in range(stages):
        start_rank(config, stage, stages)
        built = transformer_config(hf_config, actor)
        built.perform_initialization = False
        vpp = built.virtual_pipeline_model_parallel_size
        with FakeTensorMode(allow_non_fake_inputs=True):
            virtual: list[int | None] = [None] if vpp is None else list(range(vpp))
            chunks = [megatron_model._build_chunk(built, hf_config, actor, number) for number in virtual]
            if actor.lora is not None:
                add_adapters(chunks, WeightMap(hf_config, str(path)), actor.lora, seed=0)
            ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
            wrapped = [DistributedDataParallel(built, ddp, chunk) for chunk in chunks]
            buffers = [buffer for chunk in wrapped for buffer in chunk.buffers + chunk.expert_parallel_buffers]
            row = {
                "weights": sum(p.numel() * p.element_size() for chunk in chunks for p in chunk.parameters()),
                "gradients": sum(buffer.grad_data.numel() * buffer.grad_data.element_size() for buffer in buffers),
                "layers": len(chunks[0].decoder.layers),
            }
            if stage == 0 and not built.num_moe_experts:  # a router's choices are data
                row["kept"] = kept_bytes(chunks[0], actor.max_tokens_per_micro_batch, built.context_parallel_size)
        rows.append(row)
        end_rank()
    return rows


def main(out: str, *configs: str) -> None:
    RMSNorm.forward = lambda self, x: FusedNorm.apply(x, self.weight)  # type: ignore[method-assign]
    GPTModel.to = lambda self, *given: self  # type: ignore[method-assign]  # to the device that has no memory
    found = {Path(config).name: rows_of(Path(config)) for config in configs}
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])

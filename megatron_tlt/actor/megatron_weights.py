"""Transfers weights between Hugging Face folders and Megatron's shards; each rank reads only its own shards."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.models.gpt.gpt_model import GPTModel
from torch.distributed.checkpoint.api import CheckpointException

from megatron_tlt.actor.megatron_reader import load_sharded
from megatron_tlt.checkpoint.metadata import METADATA, refuse_adapters
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.hf_folder import SafetensorsFolder
from megatron_tlt.models.weight_map import Piece, WeightMap
from megatron_tlt.platform.device import current_device
from megatron_tlt.reshard.spans import Span

# Transformer Engine fuses a norm with the linear layer after it; grouped experts are numbered at the end.
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
ADAPTERS = "lora"
"""Name of a chunk's submodule with adapters, whose parameters are no tensors of the model."""

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.(?:local_experts\.(\d+)\.(linear_fc\d\.weight)|(linear_fc\d\.weight)(\d+))")


@dataclass(frozen=True)
class Shard:
    """One parameter of this rank: its name in the full model, and its slices of Hugging Face tensors."""

    name: str
    parameter: torch.nn.Parameter
    pieces: tuple[Piece, ...]
    exported: bool
    """Whether this rank is the replica that exports it."""


def whole_model_name(local: str, first_layer: int, first_expert: int) -> str:
    """The name of a chunk's parameter in the full model, as in ``models.weight_map``."""
    layer = _LAYER.fullmatch(local)
    if layer is None:
        return local
    tail = _FUSED_NORMS.get(layer[2], layer[2])
    if expert := _EXPERT.fullmatch(tail):
        number = first_expert + int(expert[1] or expert[4])
        tail = f"mlp.experts.{number}.{expert[2] or expert[3]}"
    return f"decoder.layers.{first_layer + int(layer[1])}.{tail}"


def whole_model_names(weights: WeightMap, chunks: Sequence[GPTModel]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Every parameter of this rank's chunks with its name in the full model; adapters with their own names."""
    expert_ranks = parallel_state.get_expert_model_parallel_world_size()
    first_expert = parallel_state.get_expert_model_parallel_rank() * (weights.num_experts // expert_ranks)
    for chunk in chunks:
        first_layer = chunk.decoder.layers[0].layer_number - 1 if len(chunk.decoder.layers) else 0
        for local, parameter in chunk.named_parameters():
            yield whole_model_name(local, first_layer, first_expert), parameter


def shards(weights: WeightMap, chunks: Sequence[GPTModel]) -> Iterator[Shard]:
    """Every parameter of this rank's chunks but adapters."""
    tensor = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    for name, parameter in whole_model_names(weights, chunks):
        if name.startswith(f"{ADAPTERS}."):
            continue
        rank, size = tensor
        if weights.is_expert(name):
            rank = parallel_state.get_expert_tensor_parallel_rank()
            size = parallel_state.get_expert_tensor_parallel_world_size()
        pieces = weights.pieces(name, rank, size)
        replicated = pieces == weights.pieces(name, 0, 1) and size > 1
        # The last pipeline stage's tied embedding is a copy of the first stage's.
        copy = weights.tied and name == "output_layer.weight"
        yield Shard(name, parameter, pieces, exported=not copy and not (replicated and rank))


@torch.no_grad()
def load_weights(weights: WeightMap, chunks: Sequence[GPTModel], folder: Path) -> None:
    """Loads this rank's shards from a Hugging Face folder; rows that pad the vocabulary become 0.

    Raises:
        ConfigError: a tensor is missing, or its shape differs from that in ``config.json``.
    """
    source = SafetensorsFolder(folder)
    source.check(weights)
    for shard in shards(weights, chunks):
        covered = sum(piece.length for piece in shard.pieces)
        dim = shard.pieces[0].dim if shard.pieces else 0
        if covered < shard.parameter.shape[dim]:
            shard.parameter.zero_()
        for piece in shard.pieces:
            part = source.read(piece.name, piece.dim, piece.start, piece.length)
            shard.parameter.narrow(piece.dim, piece.offset, piece.length).copy_(part)


@torch.no_grad()
def load_checkpoint_weights(chunks: Sequence[GPTModel], folder: Path) -> None:
    """Loads this rank's shards from a Megatron distributed checkpoint of any layout; a collective over the world.

    Raises:
        ConfigError: the checkpoint belongs to another model, has adapters, or cannot be read.
    """
    if (folder / METADATA).is_file():
        refuse_adapters(folder)
    for chunk in chunks:
        # Transformer Engine's extra state contains no weights.
        state = {name: part for name, part in chunk.sharded_state_dict().items() if not name.endswith("_extra_state")}
        try:
            loaded = load_sharded(state, folder)
        except (OSError, KeyError, RuntimeError, CheckpointException, CheckpointingException) as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise ConfigError(f"{folder}: not a checkpoint of this model: {reason}") from error
        chunk.load_state_dict(loaded, strict=False)


def held_spans(weights: WeightMap, chunks: Sequence[GPTModel]) -> Iterator[tuple[Span, torch.Tensor]]:
    """This rank's spans of each Hugging Face tensor, with views of the data; includes replicas and tied copies."""
    for shard in shards(weights, chunks):
        for piece in shard.pieces:
            view = shard.parameter.detach().narrow(piece.dim, piece.offset, piece.length)
            yield Span(piece.name, piece.start, piece.length), view


def _sum_bits(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Sums tensors over a group; at each entry only one may be nonzero. Sums integers, so that -0.0 is preserved."""
    flat = tensor.view(-1)
    words = flat.view(torch.int32) if flat.numel() * flat.element_size() % 4 == 0 else flat.view(torch.uint8)
    dist.all_reduce(words, group=group)


@torch.no_grad()
def export_weights(
    weights: WeightMap, chunks: Sequence[GPTModel], names: Collection[str] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields every full weight (or those of ``names``) under its Hugging Face name, on every rank.

    A collective over the model-parallel groups. Names that the model lacks, such as a tied head, are skipped.
    """
    held: dict[str, list[tuple[torch.Tensor, Piece]]] = {}
    for shard in shards(weights, chunks):
        for piece in shard.pieces:
            if shard.exported:
                part = shard.parameter.detach().narrow(piece.dim, piece.offset, piece.length)
                held.setdefault(piece.name, []).append((part, piece))
    some = next(chunks[0].parameters())
    for name, shape in weights.shapes.items():
        if names is not None and name not in names:
            continue
        parts = [(part, piece.dim, piece.start) for part, piece in held.get(name, [])]
        yield name, whole_tensor(name, shape, parts, some.dtype)


def whole_tensor(
    name: str, shape: tuple[int, ...], parts: Sequence[tuple[torch.Tensor, int, int]], dtype: torch.dtype
) -> torch.Tensor:
    """A tensor from the parts that ranks hold, each with its dimension and start; a collective of model-parallel ranks.

    Each entry must be held by one rank alone.
    """
    full = torch.zeros(shape, dtype=dtype, device=current_device().torch_device)
    for part, dim, start in parts:
        full.narrow(dim, start, part.shape[dim]).copy_(part)
    expert = WeightMap.is_expert_tensor(name)
    group = (
        parallel_state.get_expert_tensor_model_pipeline_parallel_group()
        if expert
        else parallel_state.get_model_parallel_group()
    )
    if dist.get_world_size(group) > 1:
        _sum_bits(full, group)
    return full

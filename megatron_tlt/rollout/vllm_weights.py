"""Writes Hugging Face tensors into a live vLLM model and reads them back, unfused, under the same names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from megatron_tlt.errors import RunError
from megatron_tlt.rollout.types import ShardSlice
from megatron_tlt.rollout.vllm_experts import expert_weights

HeldWeight = tuple[str, torch.Tensor, ShardSlice | None]
"""A weight's Hugging Face name, this rank's tensor, and its place in the full tensor; None: the full tensor."""


@dataclass(frozen=True)
class _Part:
    """One Hugging Face tensor inside a vLLM parameter: rows ``offset .. offset + length`` of the local ``dim``."""

    name: str
    dim: int
    offset: int
    length: int
    shard: ShardSlice | None


def _qkv_parts(layer: Any, names: list[str]) -> Iterator[_Part]:
    offset = 0
    heads = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
    sizes = (layer.head_size, layer.head_size, layer.v_head_size)
    # with more ranks than key/value heads, neighbouring ranks hold the same head
    ranks = (layer.tp_rank, *[layer.tp_rank // layer.num_kv_head_replicas] * 2)
    for name, num_heads, size, rank in zip(names, heads, sizes, ranks, strict=True):
        length = num_heads * size
        yield _Part(name, 0, offset, length, ShardSlice(0, rank * length, length))
        offset += length


def _merged_parts(layer: Any, names: list[str]) -> Iterator[_Part]:
    offset = 0
    for name, full in zip(names, layer.output_sizes, strict=True):
        length = full // layer.tp_size
        yield _Part(name, 0, offset, length, ShardSlice(0, layer.tp_rank * length, length))
        offset += length


def _linear_parts(layer: Any, names: list[str], kind: str, param: torch.Tensor) -> list[_Part]:
    from vllm.model_executor.layers import linear

    # exact types: a subclass may arrange its rows in another way
    if type(layer) is linear.QKVParallelLinear:
        parts = list(_qkv_parts(layer, names))
    elif type(layer) is linear.MergedColumnParallelLinear:
        parts = list(_merged_parts(layer, names))
    elif len(names) > 1:
        return []
    elif type(layer) is linear.ColumnParallelLinear or (type(layer) is linear.RowParallelLinear and kind == "weight"):
        dim = 0 if isinstance(layer, linear.ColumnParallelLinear) else 1
        length = param.shape[dim]
        parts = [_Part(names[0], dim, 0, length, ShardSlice(dim, layer.tp_rank * length, length))]
    elif type(layer) is linear.RowParallelLinear or isinstance(layer, linear.ReplicatedLinear):
        parts = [_Part(names[0], 0, 0, param.shape[0], None)]
    else:
        return []
    return parts if layer.tp_size > 1 else [_Part(p.name, p.dim, p.offset, p.length, None) for p in parts]


def _parts(layer: Any, names: list[str], kind: str, param: torch.Tensor) -> list[_Part]:
    """The Hugging Face tensors, in the order of ``names``, in parameter ``kind`` (weight or bias) of ``layer``.

    Empty for a layer of an unknown kind or a quantised layer.
    """
    from vllm.model_executor.layers import layernorm, linear, vocab_parallel_embedding

    if kind not in ("weight", "bias"):
        return []
    if isinstance(layer, linear.LinearBase):
        plain = isinstance(layer.quant_method, linear.UnquantizedLinearMethod)
        return _linear_parts(layer, names, kind, param) if plain else []
    if len(names) > 1:
        return []
    if isinstance(layer, vocab_parallel_embedding.VocabParallelEmbedding):
        if not isinstance(layer.quant_method, vocab_parallel_embedding.UnquantizedEmbeddingMethod):
            return []
        # local rows outside the vocabulary are padding
        start, end = layer.shard_indices.org_vocab_start_index, layer.shard_indices.org_vocab_end_index
        shard = ShardSlice(0, start, end - start) if layer.tp_size > 1 else None
        return [_Part(names[0], 0, 0, end - start, shard)]
    if isinstance(layer, layernorm.RMSNorm):
        return [_Part(names[0], 0, 0, param.shape[0], None)]
    return []


def read_weights(model: torch.nn.Module, without: Collection[int] = ()) -> Iterator[HeldWeight]:
    """Yield (Hugging Face name, this rank's tensor, its place in the full tensor) for each weight of the engine.

    Tensors are views of the engine's memory, in its dtype. Writing to them between ``begin_update`` and
    ``finish_update`` updates the weights in place. The slice is None if the rank holds the full tensor. Tied output
    weights appear once, as the embedding. Padding rows of the vocabulary and experts of other ranks are omitted.
    ``without`` are ids of parameters to omit.

    Raises:
        RunError: the engine keeps a weight packed or quantised, or in an unknown kind of layer.
    """
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    seen = set(without)
    for prefix, layer in model.named_modules():
        if isinstance(layer, RoutedExperts):
            yield from expert_weights(prefix, layer)
            continue
        head, _, tail = prefix.rpartition(".")
        hf_modules = [f"{head}.{part}" if head else part for part in packed.get(tail, [tail])]
        for kind, param in layer.named_parameters(recurse=False):
            if id(param) in seen:
                continue
            seen.add(id(param))
            if param.numel() == 0:
                raise RunError(f"vLLM's {prefix}.{kind} is packed and cannot be read back")
            names = [f"{module}.{kind}" if module else kind for module in hf_modules]
            parts = _parts(layer, names, kind, param)
            if not parts:
                raise RunError(
                    f"vLLM's {prefix}.{kind} is in a layer of kind {type(layer).__name__} "
                    f"({type(getattr(layer, 'quant_method', None)).__name__}); allowed: plain linear layers, "
                    "embeddings, RMSNorms and experts"
                )
            for part in parts:
                yield part.name, param.data.narrow(part.dim, part.offset, part.length), part.shard


def load_weights(model: torch.nn.Module, named: Iterable[tuple[str, torch.Tensor]]) -> int:
    """Write full Hugging Face tensors into the engine in place; returns their number.

    Raises:
        RunError: a name is unknown, a shape does not fit, or a weight of the engine is missing.
    """
    given: list[str] = []
    held = {name: (tensor.shape, shard) for name, tensor, shard in read_weights(model)}

    def recorded() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in named:
            given.append(name)
            if name in held:
                _check_shape(tensor, *held[name])
            yield name, tensor

    try:
        with torch.no_grad():
            model.load_weights(recorded())  # type: ignore[operator]
    except (ValueError, KeyError, AssertionError, RuntimeError) as error:
        at = given[-1] if given else "the first tensor"
        reason = " ".join(str(error).split()) or type(error).__name__
        raise RunError(f"vLLM could not load {at}: {reason}") from error
    if missing := sorted(held.keys() - set(given)):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise RunError(f"no new weights were given for {missing[0]}{more}; the engine would keep stale ones")
    return len(given)


def _check_shape(tensor: torch.Tensor, held: torch.Size, shard: ShardSlice | None) -> None:
    """Check the shape, because vLLM's loader of experts silently writes the part that fits."""
    shape = list(tensor.shape)
    if shard is not None and len(shape) == len(held) and shape[shard.dim] >= shard.start + shard.length:
        shape[shard.dim] = shard.length
    if shape != list(held):
        where = "" if shard is None else f" at {shard.start} of dimension {shard.dim}"
        raise ValueError(f"its shape is {list(tensor.shape)}; the engine holds {list(held)}{where}")

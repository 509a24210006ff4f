"""Writing Hugging Face tensors into a live vLLM model and reading them back, un-fused, under the same names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from megatron_tlt.errors import RunError


@dataclass(frozen=True)
class ShardSlice:
    """Where a rank's shard lies in the full tensor: rows ``start .. start + length`` of dimension ``dim``."""

    dim: int
    start: int
    length: int

    def of(self, full: torch.Tensor) -> torch.Tensor:
        """The matching view of the full tensor."""
        return full.narrow(self.dim, self.start, self.length)


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
    # where there are more ranks than key/value heads, neighbours hold the same head
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


def _parts(layer: torch.nn.Module, names: list[str], kind: str, param: torch.Tensor) -> Iterator[_Part]:
    """The Hugging Face tensors, in the order of ``names``, in parameter ``kind`` (weight or bias) of ``layer``."""
    from vllm.model_executor.layers import linear
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    if isinstance(layer, linear.QKVParallelLinear):
        yield from _qkv_parts(layer, names)
    elif isinstance(layer, linear.MergedColumnParallelLinear):
        yield from _merged_parts(layer, names)
    elif isinstance(layer, VocabParallelEmbedding):
        # local rows beyond the vocabulary are padding
        start, end = layer.shard_indices.org_vocab_start_index, layer.shard_indices.org_vocab_end_index
        yield _Part(names[0], 0, 0, end - start, ShardSlice(0, start, end - start))
    elif isinstance(layer, linear.ColumnParallelLinear) or (
        isinstance(layer, linear.RowParallelLinear) and kind == "weight"
    ):
        dim = 0 if isinstance(layer, linear.ColumnParallelLinear) else 1
        length = param.shape[dim]
        yield _Part(names[0], dim, 0, length, ShardSlice(dim, layer.tp_rank * length, length))
    else:
        yield _Part(names[0], 0, 0, param.shape[0], None)


def read_weights(model: torch.nn.Module, tp_size: int) -> Iterator[tuple[str, torch.Tensor, ShardSlice | None]]:
    """Yield (Hugging Face name, this rank's tensor, its place in the full tensor) for each weight of the engine.

    Tensors are views of the engine's memory, in its dtype: do not write to them. The slice is None where the rank holds
    the whole tensor (always, for ``tp_size`` 1). Tied output weights appear once, as the embedding.

    Raises:
        RunError: the engine keeps a weight packed, so that it cannot be read.
    """
    packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    seen: set[int] = set()
    for prefix, layer in model.named_modules():
        head, _, tail = prefix.rpartition(".")
        hf_modules = [f"{head}.{part}" if head else part for part in packed.get(tail, [tail])]
        for kind, param in layer.named_parameters(recurse=False):
            if id(param) in seen:
                continue
            seen.add(id(param))
            if param.numel() == 0:
                raise RunError(f"vLLM's {prefix}.{kind} is packed away and cannot be read back")
            names = [f"{module}.{kind}" if module else kind for module in hf_modules]
            for part in _parts(layer, names, kind, param):
                tensor = param.data.narrow(part.dim, part.offset, part.length)
                yield part.name, tensor, part.shard if tp_size > 1 else None


def load_weights(model: torch.nn.Module, named: Iterable[tuple[str, torch.Tensor]], tp_size: int) -> int:
    """Write full Hugging Face tensors into the engine in place; returns how many were given.

    Raises:
        RunError: an unknown name, a shape that does not fit, or a weight of the engine that nothing was given for.
    """
    given: list[str] = []

    def recorded() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in named:
            given.append(name)
            yield name, tensor

    try:
        with torch.no_grad():
            model.load_weights(recorded())  # type: ignore[operator]
    except (ValueError, KeyError, AssertionError, RuntimeError) as error:
        at = given[-1] if given else "the first tensor"
        reason = " ".join(str(error).split()) or type(error).__name__
        raise RunError(f"vLLM could not load {at}: {reason}") from error
    expected = {name for name, _, _ in read_weights(model, tp_size)}
    if missing := sorted(expected.difference(given)):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise RunError(f"no new weights were given for {missing[0]}{more}; the engine would keep stale ones")
    return len(given)

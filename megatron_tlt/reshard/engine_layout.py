"""The weights that every rank of vLLM's engines needs, computed without vLLM; pure.

The rules are vLLM's own: ``QKVParallelLinear``, ``VocabParallelEmbedding``, ``MergedColumnParallelLinear``,
``RowParallelLinear``, and ``fused_moe``'s linear placement of experts. An engine has consecutive ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron_tlt.errors import ConfigError
from megatron_tlt.reshard.spans import ShardMap, Span

if TYPE_CHECKING:
    from megatron_tlt.models.weight_map import WeightMap

_KEY = "rollout.tensor_parallel_size"
# vLLM pads the rows of a vocabulary to a multiple of this before sharding (DEFAULT_VOCAB_PADDING_SIZE).
_VOCAB_MULTIPLE = 64
_VOCABULARY = ("embed_tokens", "lm_head")


def engine_side(weights: WeightMap, world: int, tensor_parallel_size: int, expert_parallel: bool) -> ShardMap:
    """The spans that each of ``world`` ranks needs in engines of ``tensor_parallel_size`` consecutive ranks each.

    A tied output layer is the embedding's own parameter in vLLM and needs nothing. No rank needs the rows that pad the
    vocabulary. With ``expert_parallel``, experts are whole and distributed over an engine's ranks, rather than sharded.
    Raises ConfigError if a size does not divide the world or a dimension that vLLM shards; one line each.
    """
    if tensor_parallel_size < 1 or world % tensor_parallel_size:
        raise ConfigError(f"{_KEY}: found {tensor_parallel_size}; allowed: a divisor of the {world} processes")
    shares = _Shares(weights, tensor_parallel_size, expert_parallel and tensor_parallel_size > 1)
    if found := list(shares.problems()):
        raise ConfigError("\n".join(found))
    engine = [tuple(shares.of(rank)) for rank in range(tensor_parallel_size)]
    words = f"TP{tensor_parallel_size}" + ("+EP" if shares.expert_parallel else "")
    return ShardMap(
        f"{words} x {world // tensor_parallel_size}", tuple(engine[r % tensor_parallel_size] for r in range(world))
    )


class _Shares:
    """Distribution of a model's tensors over one engine's ranks."""

    def __init__(self, weights: WeightMap, size: int, expert_parallel: bool) -> None:
        self._weights = weights
        self._size = size
        self.expert_parallel = expert_parallel

    def problems(self) -> Iterator[str]:
        size, heads = self._size, self._weights.num_key_value_heads
        if heads % size and size % heads:
            yield f"{_KEY}: found {size}; allowed: a divisor or multiple of the {heads} key-value heads"
        if _VOCAB_MULTIPLE % size and self._padded_vocabulary() % size:
            yield f"{_KEY}: found {size}; allowed: a divisor of vLLM's padded vocabulary, {self._padded_vocabulary()}"
        named = set()
        for name, shape in self._weights.shapes.items():
            length, kind = shape[self._weights.cut_dims[name]], _module(name)
            if self._is_cut(name) and length % size and (kind, length) not in named:
                named.add((kind, length))
                yield f"{_KEY}: found {size}; allowed: a divisor of {length}, what it divides of {name}"

    def of(self, rank: int) -> Iterator[Span]:
        """The spans that one of the engine's ranks needs, in the model's order."""
        weights, size = self._weights, self._size
        for name, shape in weights.shapes.items():
            length, kind = shape[weights.cut_dims[name]], _module(name)
            if kind in _VOCABULARY:
                rows = self._padded_vocabulary() // size
                start, end = rank * rows, min((rank + 1) * rows, length)
            elif self._is_cut(name):
                start, end = length * rank // size, length * (rank + 1) // size
            elif kind in ("k_proj", "v_proj"):
                # With more ranks than heads, size / heads consecutive ranks hold the same head.
                head = rank // (size // weights.num_key_value_heads)
                start, end = head * weights.head_dim, (head + 1) * weights.head_dim
            elif self._is_elsewhere(name, rank):
                continue
            else:
                start, end = 0, length
            if start < end:
                yield Span(name, start, end - start)

    def _padded_vocabulary(self) -> int:
        rows = self._weights.shapes["model.embed_tokens.weight"][0]
        return -(-rows // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE

    def _is_cut(self, name: str) -> bool:
        """Whether every rank has an equal share of a tensor."""
        weights, kind = self._weights, _module(name)
        if kind in _VOCABULARY:
            return False
        if kind in ("k_proj", "v_proj"):
            return weights.num_key_value_heads % self._size == 0
        if weights.is_expert_tensor(name):
            return not self.expert_parallel
        experts = weights.family.experts
        is_norm = kind.endswith("norm")
        return not is_norm and not (experts and name.endswith(experts.router))

    def _is_elsewhere(self, name: str, rank: int) -> bool:
        """Whether a whole expert belongs to another rank; if uneven, the first ranks hold one more."""
        if not self._weights.is_expert_tensor(name):
            return False
        expert = int(name.split(".experts.")[1].split(".")[0])
        each, more = divmod(self._weights.num_experts, self._size)
        first = rank * each + min(rank, more)
        return not first <= expert < first + each + (rank < more)


def _module(name: str) -> str:
    return name.split(".")[-2]

"""Positions of slices in a model's tensors, as plain data: what actor ranks hold and what engine ranks need.

Each tensor, under its Hugging Face name, is sharded along one dimension, the same on both sides: rows of embeddings
and of column-parallel layers, columns of row-parallel layers. So a slice is a span of entries along that dimension.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from megatron_tlt.models.weight_map import WeightMap
    from megatron_tlt.reshard.direct import WholeTensors


@dataclass(frozen=True, slots=True)
class TensorForm:
    """A whole tensor in its sent form: its shape, the dimension it is sharded along, bytes per element."""

    shape: tuple[int, ...]
    dim: int
    itemsize: int

    @property
    def length(self) -> int:
        """Number of entries along the sharded dimension."""
        return self.shape[self.dim]

    @property
    def entry_bytes(self) -> int:
        """Bytes of one such entry."""
        return prod(self.shape) // self.length * self.itemsize


class Span(NamedTuple):
    """Entries ``start .. start + length`` of ``tensor`` along the sharded dimension."""

    tensor: str
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class ShardMap:
    """One side of a transfer: a description of its layout for errors and tables, and the spans of each rank.

    On the actor's side several ranks may hold the same entries (replicas); on the engines' side a rank may need the
    same entries twice. A span's position in its rank's list is its ``slot``.
    """

    layout: str
    spans: tuple[tuple[Span, ...], ...]


def tensor_forms(weights: WeightMap | WholeTensors, itemsizes: int | Mapping[str, int]) -> dict[str, TensorForm]:
    """The forms of a model's tensors, in its order; ``itemsizes``: bytes of an element as sent, of all or of each."""
    return {
        name: TensorForm(shape, weights.cut_dims[name], itemsizes if isinstance(itemsizes, int) else itemsizes[name])
        for name, shape in weights.shapes.items()
    }

"""Where slices of a model's tensors lie, in plain data: what actor ranks hold and what engine ranks need.

Each tensor, under its Hugging Face name, is cut along one dimension, the same on both sides: rows of embeddings and of
column-parallel layers, columns of row-parallel ones. So a slice of it is a span of entries along that dimension.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_tlt.models.weight_map import WeightMap


@dataclass(frozen=True, slots=True)
class TensorForm:
    """A whole tensor as it travels: its shape, the dimension it is cut along, bytes of an element on the wire."""

    shape: tuple[int, ...]
    dim: int
    itemsize: int

    @property
    def length(self) -> int:
        """Entries along the dimension that it is cut along."""
        return self.shape[self.dim]

    @property
    def entry_bytes(self) -> int:
        """Bytes of one such entry."""
        return prod(self.shape) // self.length * self.itemsize


@dataclass(frozen=True, slots=True)
class Span:
    """Entries ``start .. start + length`` of ``tensor`` along the dimension that it is cut along."""

    tensor: str
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class Side:
    """One side of a transfer: its layout in words, for errors and tables, and the spans of each rank of the world.

    On the actor's side ranks may hold the same entries (replicas); on the engines' side a rank may need the same
    entries twice. A span's place in its rank's list is its ``slot``.
    """

    layout: str
    spans: tuple[tuple[Span, ...], ...]


def tensor_forms(weights: WeightMap, itemsizes: int | Mapping[str, int]) -> dict[str, TensorForm]:
    """The forms of a model's tensors, in its order.

    Args:
        weights: the model's map.
        itemsizes: bytes of an element on the wire; of all tensors, or of each.
    """
    return {
        name: TensorForm(shape, weights.cut_dims[name], itemsizes if isinstance(itemsizes, int) else itemsizes[name])
        for name, shape in weights.shapes.items()
    }

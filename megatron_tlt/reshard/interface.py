"""What moving weights from the actor to the engines means, whatever the method.

The mechanisms here know neither Megatron nor vLLM: they see named tensors on one side and a target on the other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

WeightSource = Callable[[], Iterator[tuple[str, torch.Tensor]]]
"""Yields every weight under its Hugging Face name; a collective that every rank exhausts."""


class TensorSlice(Protocol):
    """The part of a whole tensor that one rank holds: ``length`` entries from ``start`` along ``dim``."""

    @property
    def dim(self) -> int: ...

    @property
    def start(self) -> int: ...

    @property
    def length(self) -> int: ...


class WeightTarget(Protocol):
    """An engine that weights go into, and that can be asked what it holds."""

    def load_weights(self, named: Iterable[tuple[str, torch.Tensor]]) -> int: ...

    def read_weights(self) -> Iterator[tuple[str, torch.Tensor, TensorSlice | None]]: ...


@dataclass(frozen=True)
class SyncReport:
    """One transfer: tensors in the engine, how many of them were proven equal to the actor's, seconds taken."""

    tensors: int
    verified_tensors: int
    seconds: float


class WeightSync(ABC):
    """Moves the actor's weights into the engines."""

    @abstractmethod
    def sync(self, *, verify: bool) -> SyncReport:
        """Moves every weight; a collective over the world.

        Args:
            verify: prove by checksums that the engine holds what the actor sent.

        Raises:
            RunError: a tensor is missing on one side or differs; names tensor and rank. The engine must not be used.
        """

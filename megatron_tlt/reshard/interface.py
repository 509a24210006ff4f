"""What moving weights from the actor to the engines means.

The mechanisms here know neither Megatron nor vLLM: they see named tensors on one side and a target on the other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from megatron_tlt.reshard.spans import Span

SpanSource = Callable[[], Iterable[tuple[Span, torch.Tensor]]]
"""Yields what this rank holds of every tensor, with views of it; may be a collective."""

Part = Literal["policy", "drafter"]
"""The weights of an engine that are replaced together, and have a version together."""


class TensorSlice(Protocol):
    """The part of a whole tensor that one rank holds: ``length`` entries from ``start`` along ``dim``."""

    @property
    def dim(self) -> int: ...

    @property
    def start(self) -> int: ...

    @property
    def length(self) -> int: ...


HeldWeights = Iterator[tuple[str, torch.Tensor, TensorSlice | None]]
"""Names, views of the engine's memory, and their places in the whole tensors (None: the whole)."""


class WeightTarget(Protocol):
    """An engine that weights go into, and that can be asked what it holds."""

    def begin_update(self, part: Part) -> None:
        """From here on the engine refuses to generate with this part."""
        ...

    def finish_update(self, part: Part, version: int) -> None:
        """The part is whole again, and of this version."""
        ...

    def load_weights(self, named: Iterable[tuple[str, torch.Tensor]]) -> int: ...

    def read_weights(self) -> HeldWeights: ...

    def read_drafter_weights(self) -> HeldWeights: ...


@dataclass(frozen=True)
class SyncReport:
    """One transfer on one rank: tensors in its engine, how many of them were proven equal to the actor's, seconds.

    Bytes are this rank's, but for ``lower_bound_bytes``: what all ranks together need and do not hold. None where the
    method does not say.
    """

    tensors: int
    verified_tensors: int
    seconds: float
    version: int
    sent_bytes: int | None = None
    received_bytes: int | None = None
    copied_bytes: int | None = None
    lower_bound_bytes: int | None = None
    staging_bytes: int | None = None


class WeightSync(ABC):
    """Moves weights into the engines."""

    @abstractmethod
    def sync(self, *, version: int, verify: bool) -> SyncReport:
        """Moves every weight; a collective over the world.

        Until it returns the engine refuses to generate, and if it raises, for good.

        Args:
            version: what the engine reports from now on.
            verify: prove by checksums that the engine holds what the actor sent.

        Raises:
            RunError: a tensor is missing on one side or differs, or a rank is gone; names tensor and rank.
        """

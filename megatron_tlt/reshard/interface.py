"""The interface for moving weights from the actor to the engines.

Its implementations know neither Megatron nor vLLM: they use named tensors on one side and a target on the other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from megatron_tlt.reshard.spans import Span

SpanViews = Sequence[tuple[Span, torch.Tensor]]
SpanSource = Callable[[], SpanViews]
"""This rank's part of every tensor, with views of it; the same object while they are the same. May be a collective."""

Part = Literal["policy", "drafter"]
"""A part of the engine whose weights are replaced together and have one version."""


class TensorSlice(Protocol):
    """The part of a whole tensor that one rank holds: ``length`` entries from ``start`` along ``dim``."""

    @property
    def dim(self) -> int: ...

    @property
    def start(self) -> int: ...

    @property
    def length(self) -> int: ...


HeldWeights = Sequence[tuple[str, torch.Tensor, TensorSlice | None]]
"""Names, views of the engine's memory, and their positions in the whole tensors (None: the whole).

The same object while the views are the same.
"""


class WeightTarget(Protocol):
    """An engine that receives weights and can report the weights it holds."""

    def begin_update(self, part: Part) -> None:
        """Marks the part as incomplete: the engine then refuses to generate with it."""
        ...

    def finish_update(self, part: Part, version: int) -> None:
        """Marks the part as complete, with this version."""
        ...

    def load_weights(self, named: Iterable[tuple[str, torch.Tensor]]) -> int: ...

    def read_weights(self) -> HeldWeights: ...

    def read_drafter_weights(self) -> HeldWeights: ...


@dataclass(frozen=True)
class SyncReport:
    """One transfer on one rank: tensors in its engine, how many were verified equal to the actor's, seconds.

    Bytes are this rank's, except ``lower_bound_bytes``: bytes that all ranks together need and do not hold. None if the
    method does not report it.
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
        """Moves every weight; a collective over the world. The engine then reports ``version``.

        The engine refuses to generate until this returns, and for ever if this raises. ``verify`` compares checksums of
        what the engine holds with those of the actor's weights. Raises RunError if a tensor is missing on one side or
        differs, or a rank is gone; names tensor and rank.
        """


class NoTransfer(WeightSync):
    """``reshard.method: none``, for engines that take no weights: nothing is moved, and nothing proven."""

    def sync(self, *, version: int, verify: bool) -> SyncReport:
        return SyncReport(tensors=0, verified_tensors=0, seconds=0.0, version=version)

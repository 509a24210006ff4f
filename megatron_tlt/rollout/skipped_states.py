"""Hidden states of tokens that a drafter head skipped, kept until it is used again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from megatron_tlt.config.speculation import SkippedConfig


@dataclass
class SkippedCounts:
    """Tokens that the head skipped, those of them computed later, and those whose states were gone by then."""

    skipped: int = 0
    filled: int = 0
    dropped: int = 0


@dataclass(slots=True)
class _Segment:
    """``length`` tokens from ``position`` on, in rows from ``row`` on (counted over the store's whole life)."""

    position: int
    row: int
    length: int


@dataclass
class Gap:
    """States of consecutive tokens from ``position`` on are in ``rows`` (length,) of ``SkippedStates.states``."""

    position: int
    rows: torch.Tensor


class SkippedStates:
    """A ring of hidden-state rows, and which tokens of which request lie where.

    The ring is allocated at the first use. Rows are overwritten in the order in which they came.
    """

    def __init__(self, limits: SkippedConfig, max_requests: int) -> None:
        self._limits = limits
        self._max_requests = max_requests
        self._ring: torch.Tensor | None = None
        self._written = 0
        self._segments: dict[str, deque[_Segment]] = {}
        self.counts = SkippedCounts()

    @property
    def states(self) -> torch.Tensor:
        """The ring: (rows, features)."""
        assert self._ring is not None, "nothing was ever appended"
        return self._ring

    def append(self, states: torch.Tensor, spans: Iterable[tuple[str, int, int]]) -> None:
        """Keep ``states`` (tokens, features), which are those of the spans (request, position, length) in turn.

        What a request had at or behind a span's position counts as computed anew and is forgotten.
        """
        if self._ring is None:
            row_bytes = max(1, states.shape[1] * states.element_size())
            rows = min(self._limits.max_bytes // row_bytes, self._limits.window * self._max_requests)
            self._ring = states.new_empty((rows, states.shape[1]))
        row = self._written
        for request, position, length in spans:
            segments = self._segments.get(request)
            if segments is None:
                segments = self._segments[request] = deque()
            elif segments and segments[-1].position + segments[-1].length > position:
                self.drop_from(request, position)
            segments.append(_Segment(position, row, length))
            row += length
            if segments[0].position + self._limits.window < position + length:
                self._keep_window(segments)
        self.counts.skipped += len(states)
        self._write(states)

    def _write(self, states: torch.Tensor) -> None:
        ring, capacity = self.states, len(self.states)
        self._written += len(states)
        kept = states[max(0, len(states) - capacity) :]
        if not len(kept):
            return
        start = (self._written - len(kept)) % capacity
        head = min(len(kept), capacity - start)
        ring[start : start + head] = kept[:head]
        ring[: len(kept) - head] = kept[head:]

    def _keep_window(self, segments: deque[_Segment]) -> None:
        end = segments[-1].position + segments[-1].length
        while segments and segments[0].position + self._limits.window < end:
            first = segments[0]
            gone = min(first.length, end - self._limits.window - first.position)
            self.counts.dropped += gone
            first.position, first.row, first.length = first.position + gone, first.row + gone, first.length - gone
            if not first.length:
                segments.popleft()

    def drop_from(self, request: str, position: int) -> None:
        """The request's tokens from ``position`` on are computed anew: forget them."""
        segments = self._segments.get(request)
        while segments and segments[-1].position + segments[-1].length > position:
            last = segments[-1]
            last.length = position - last.position
            if last.length <= 0:
                segments.pop()

    def take(self, request: str) -> list[Gap]:
        """What is left of the request's skipped tokens, by position, and forget it."""
        gaps: list[Gap] = []
        position = -1
        rows: list[int] = []
        oldest = self._written - len(self._ring) if self._ring is not None else 0
        for segment in self._segments.pop(request, ()):
            gone = min(segment.length, max(0, oldest - segment.row))
            self.counts.dropped += gone
            self.counts.filled += segment.length - gone
            first, row, length = segment.position + gone, segment.row + gone, segment.length - gone
            if not length:
                continue
            if rows and first != position + len(rows):
                gaps.append(self._gap(position, rows))
                rows = []
            if not rows:
                position = first
            rows.extend(range(row, row + length))
        if rows:
            gaps.append(self._gap(position, rows))
        return gaps

    def _gap(self, position: int, rows: list[int]) -> Gap:
        return Gap(position, torch.tensor(rows, dtype=torch.int64) % len(self.states))

    def forget(self, request: str) -> None:
        """The request has ended."""
        self._segments.pop(request, None)

    def release(self) -> None:
        """Give the ring's memory back; all requests are forgotten."""
        self._ring = None
        self._segments.clear()

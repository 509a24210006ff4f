"""Hidden states of tokens that a drafter head skipped, kept until the head is used again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_tlt.config.speculation import SkippedConfig


@dataclass
class SkippedCounts:
    """Counts of tokens that the head skipped, computed later, or lost because their states were overwritten."""

    skipped: int = 0
    filled: int = 0
    dropped: int = 0


@dataclass(slots=True)
class _Segment:
    """``length`` tokens from ``position`` on, in every ``stride``-th row from ``row`` on.

    Rows are numbered over the lifetime of the store.
    """

    position: int
    row: int
    length: int
    stride: int = 1

    @property
    def end(self) -> int:
        return self.position + self.length

    def drop_first(self, count: int) -> None:
        self.position, self.row, self.length = (
            self.position + count,
            self.row + count * self.stride,
            self.length - count,
        )


@dataclass(slots=True)
class _Stretch:
    """Consecutive steps with one token for each of the same requests, stored in O(1) per step.

    ``positions`` (requests,) are those of the first of the ``steps``, whose states start at ``row``.
    """

    requests: list[str]
    positions: np.ndarray
    row: int
    steps: int


@dataclass
class Gap:
    """States of consecutive tokens from ``position`` on, in ``rows`` (length,) of ``SkippedStates.states``."""

    position: int
    rows: np.ndarray


class SkippedStates:
    """A ring buffer of hidden-state rows with an index of requests and positions.

    The ring is allocated at first use. The oldest rows are overwritten first.
    """

    def __init__(self, limits: SkippedConfig, max_requests: int) -> None:
        self._limits = limits
        self._max_requests = max_requests
        self._ring: torch.Tensor | None = None
        self._written = 0
        self._segments: dict[str, deque[_Segment]] = {}
        self._stretch: _Stretch | None = None
        self.counts = SkippedCounts()

    @property
    def states(self) -> torch.Tensor:
        """The ring buffer: (rows, features)."""
        assert self._ring is not None, "nothing was ever appended"
        return self._ring

    def append(self, states: torch.Tensor, spans: Iterable[tuple[str, int, int]]) -> None:
        """Keep ``states`` (tokens, features), ordered by the spans (request, position, length).

        Earlier states of a request from a span's position on are discarded, since they were recomputed.
        """
        self._end_stretch()
        row = self._written
        for request, position, length in spans:
            self._add(request, _Segment(position, row, length))
            row += length
        self._write([states])

    def append_step(self, parts: list[torch.Tensor], requests: Sequence[str], positions: np.ndarray) -> None:
        """Keep the states of one token of each request, at ``positions`` (requests,).

        ``parts``: (requests, features) each; concatenated they are the states.
        """
        if not self._continues(requests, positions):
            self._end_stretch()
            self._stretch = _Stretch(list(requests), positions.copy(), self._written, 0)
        assert self._stretch is not None
        self._stretch.steps += 1
        self._write(parts)

    def _continues(self, requests: Sequence[str], positions: np.ndarray) -> bool:
        stretch = self._stretch
        return (
            stretch is not None
            and stretch.requests == requests
            and bool((positions - stretch.positions == stretch.steps).all())
        )

    def _end_stretch(self) -> None:
        """Convert the current stretch to segments per request."""
        stretch, self._stretch = self._stretch, None
        if stretch is None:
            return
        stride = len(stretch.requests)
        for at, (request, position) in enumerate(zip(stretch.requests, stretch.positions.tolist(), strict=True)):
            self._add(request, _Segment(position, stretch.row + at, stretch.steps, stride))

    def _add(self, request: str, segment: _Segment) -> None:
        segments = self._segments.get(request)
        if segments is None:
            segments = self._segments[request] = deque()
        elif segments and segments[-1].end > segment.position:
            self._cut(segments, segment.position)
        segments.append(segment)
        if segments[0].position + self._limits.window < segment.end:
            self._keep_window(segments)

    def _write(self, parts: list[torch.Tensor]) -> None:
        """Write ``parts`` (rows, features) each, side by side, after the last rows."""
        count, width = parts[0].shape[0], sum(part.shape[1] for part in parts)
        if self._ring is None:
            row_bytes = max(1, width * parts[0].element_size())
            rows = min(self._limits.max_bytes // row_bytes, self._limits.window * self._max_requests)
            self._ring = parts[0].new_empty((rows, width))
        ring, capacity = self._ring, self._ring.shape[0]
        self.counts.skipped += count
        self._written += count
        kept = min(count, capacity)
        if not kept:
            return
        start = (self._written - kept) % capacity
        if kept == count and start + count <= capacity:  # the usual case, in one operation
            torch.cat(parts, dim=1, out=ring.narrow(0, start, count))
            return
        states = torch.cat(parts, dim=1)[count - kept :]
        head = min(kept, capacity - start)
        ring[start : start + head] = states[:head]
        ring[: kept - head] = states[head:]

    def _keep_window(self, segments: deque[_Segment]) -> None:
        end = segments[-1].end
        while segments and segments[0].position + self._limits.window < end:
            first = segments[0]
            gone = min(first.length, end - self._limits.window - first.position)
            self.counts.dropped += gone
            first.drop_first(gone)
            if not first.length:
                segments.popleft()

    def drop_from(self, request: str, position: int) -> None:
        """Discard the request's tokens from ``position`` on, since they are recomputed."""
        self._end_stretch()
        self._cut(self._segments.get(request, deque()), position)

    @staticmethod
    def _cut(segments: deque[_Segment], position: int) -> None:
        while segments and segments[-1].end > position:
            last = segments[-1]
            last.length = position - last.position
            if last.length <= 0:
                segments.pop()

    def take(self, request: str) -> list[Gap]:
        """Remove and return the request's remaining skipped tokens, by position."""
        self._end_stretch()
        gaps: list[Gap] = []
        position = -1
        rows: list[int] = []
        oldest = self._written - len(self._ring) if self._ring is not None else 0
        for segment in self._segments.pop(request, ()):
            gone = min(segment.length, max(0, -((segment.row - oldest) // segment.stride)))
            self.counts.dropped += gone
            self.counts.filled += segment.length - gone
            segment.drop_first(gone)
            if not segment.length:
                continue
            if rows and segment.position != position + len(rows):
                gaps.append(self._gap(position, rows))
                rows = []
            if not rows:
                position = segment.position
            rows.extend(range(segment.row, segment.row + segment.length * segment.stride, segment.stride))
        if rows:
            gaps.append(self._gap(position, rows))
        return gaps

    def _gap(self, position: int, rows: list[int]) -> Gap:
        return Gap(position, np.array(rows) % len(self.states))

    def forget(self, request: str) -> None:
        """Discard a request that has ended."""
        self._end_stretch()
        self._segments.pop(request, None)

    def release(self) -> None:
        """Free the ring buffer and discard all requests."""
        self._ring = self._stretch = None
        self._segments.clear()

"""Hidden states that an engine computed while decoding, kept for drafter training."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from megatron_tlt.platform.host_copies import HostCopies

Span = tuple[str, int, int, int]
"""Tokens of one request in a step: key, first position, first row, number of tokens."""

_STEPS_UNDER_WAY, _BYTES_UNDER_WAY = 4, 256 << 20
"""A step's states may arrive that many steps later, unless they and the others under way are more bytes (prompts)."""


@dataclass(frozen=True)
class RecordedResponse:
    """A finished response of T tokens, prompt included.

    Attributes:
        request_id: the caller's id.
        prompt_length: tokens before the response.
        token_ids: T of them.
        hidden: (T', E) in bfloat16 on the host; row t is the state of token t. T' is T - 1, since the last token was
            sampled but not processed.
    """

    request_id: str
    prompt_length: int
    token_ids: tuple[int, ...]
    hidden: torch.Tensor


@dataclass
class _Recording:
    """Hidden states of one request: pieces with their first position, in order of computation."""

    request_id: str
    prompt: tuple[int, ...]
    response: tuple[int, ...] | None = None
    pieces: list[tuple[int, torch.Tensor]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(states.nbytes for _, states in self.pieces)

    def own(self) -> None:
        """Copy the pieces, so that memory shared with other requests of the same step can be freed."""
        self.pieces = [(position, states.clone()) for position, states in self.pieces]


class LateCopies(HostCopies):
    """Copies of which the host waits for the early ones alone."""

    def mark(self) -> torch.cuda.Event | None:
        """What says that the copies so far have arrived; None: they have."""
        return None if self._stream is None else self._stream.record_event()


@dataclass(frozen=True)
class _Step:
    """A step's states on their way to the host: the rows of ``spans``, one span after another.

    ``late`` (requests, 2) has the first position and the number of last rows that do not count for the requests
    ``numbers``, one of each span. None: the spans say all.
    """

    spans: list[Span]
    numbers: list[int]
    states: torch.Tensor
    late: torch.Tensor | None
    arrived: torch.cuda.Event | None


class RecordedStates:
    """Hidden states of the requests of a rollout, within a memory limit.

    They travel beside the computation, and a step waits for those of earlier steps alone.

    At the limit, half of the running requests are dropped, those started last first, so that complete responses of any
    length remain. If the prefix cache served the start of a prompt, its states are taken from a request that computed
    the same tokens. Incomplete responses are omitted.

    Args:
        max_bytes: memory limit.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held = 0
        self._recordings: dict[str, _Recording] = {}
        self._copies = LateCopies()
        self._under_way: deque[_Step] = deque()
        self.records = False
        """Whether the current rollout is recorded."""
        self.dropped = 0
        """Responses of the last rollout that were dropped or incomplete."""

    @property
    def num_finished(self) -> int:
        """Responses finished so far; some may prove incomplete."""
        return sum(one.response is not None for one in self._recordings.values())

    def begin(self) -> None:
        """Start recording a rollout."""
        self.end()
        self.records, self.dropped = True, 0

    def end(self) -> None:
        """Stop recording and discard everything."""
        self._recordings.clear()
        self._under_way.clear()
        self._held, self.records = 0, False

    def start(self, key: str, request_id: str, prompt: Iterable[int]) -> None:
        """Register a queued request, whose rows are added under ``key``."""
        if self.records:
            self._recordings[key] = _Recording(request_id, tuple(prompt))

    def add(self, states: torch.Tensor, spans: Sequence[Span], late: torch.Tensor | None = None) -> None:
        """Keep rows of ``states`` (rows, E): those of each span's tokens.

        ``late`` (spans, 2), where the host does not know them yet: each span's first position, in place of its own, and
        how many of its last rows do not count. Both are integers on the states' device.
        """
        numbers = [number for number, span in enumerate(spans) if span[3] and span[0] in self._recordings]
        if not numbers:
            return
        wanted = [spans[number] for number in numbers]
        picked = torch.cat([states[row : row + length] for _, _, row, length in wanted])
        on_host = self._copies.copy(picked, torch.bfloat16)
        late_on_host = None if late is None else self._copies.copy(late, torch.int64)
        self._under_way.append(_Step(wanted, numbers, on_host, late_on_host, self._copies.mark()))
        while len(self._under_way) > _STEPS_UNDER_WAY or self._bytes_under_way() > _BYTES_UNDER_WAY:
            self._receive()

    def _bytes_under_way(self) -> int:
        return sum(step.states.nbytes for step in self._under_way)

    def _receive(self) -> None:
        """Wait for the states that are under way longest, and give them to their requests."""
        step = self._under_way.popleft()
        if step.arrived is not None:
            step.arrived.synchronize()
        late = None if step.late is None else step.late.tolist()
        kept: list[tuple[str, int, torch.Tensor]] = []
        row = 0
        for number, (key, position, _, length) in zip(step.numbers, step.spans, strict=True):
            first, wrong = (position, 0) if late is None else late[number]
            if key in self._recordings and length > wrong:
                kept.append((key, first, step.states[row : row + length - wrong]))
            row += length
        if not kept:
            return
        owned = torch.cat([states for *_, states in kept])  # later steps use the pinned memory again
        self._held += owned.nbytes
        for (key, first, _), states in zip(kept, owned.split([len(states) for *_, states in kept]), strict=True):
            self._recordings[key].pieces.append((first, states))
        while self._held > self._max_bytes and self._recordings:
            self._give_up_half()

    def _give_up_half(self) -> None:
        running = [key for key, one in self._recordings.items() if one.response is None]
        candidates = running or list(self._recordings)
        for key in candidates[len(candidates) // 2 :]:
            del self._recordings[key]
            self.dropped += 1
        for one in self._recordings.values():
            one.own()
        self._held = sum(one.nbytes for one in self._recordings.values())

    def finish(self, key: str, response: Iterable[int]) -> None:
        """Complete the recording of a request with its response."""
        if key in self._recordings:
            self._recordings[key].response = tuple(response)

    def forget(self, key: str) -> None:
        """Discard the recording of a request that was dropped."""
        self._recordings.pop(key, None)

    def take(self, first: int = 0, every: int = 1) -> list[RecordedResponse]:
        """Return every ``every``-th finished response from ``first`` on, if complete; discard everything."""
        while self._under_way:
            self._receive()
        recordings = [one for one in self._recordings.values() if one.response is not None]
        self.end()
        computed: dict[tuple[int, ...], torch.Tensor] = {}  # states of full prompts, each once
        for one in recordings:
            if one.prompt not in computed and (states := joined_rows(one.pieces, len(one.prompt))) is not None:
                computed[one.prompt] = states
        found = []
        for one in recordings[first::every]:
            assert one.response is not None
            last = len(one.prompt) + len(one.response) - 1
            states = joined_rows(one.pieces, last)
            if states is None and (beginning := _beginning(one, computed)) is not None:
                states = joined_rows([(0, beginning), *one.pieces], last)
            one.pieces.clear()  # joining copies; keeping the pieces too would double the memory
            if states is None or last <= len(one.prompt):
                self.dropped += states is None
                continue
            found.append(RecordedResponse(one.request_id, len(one.prompt), one.prompt + one.response, states))
        return found


def _beginning(one: _Recording, computed: dict[tuple[int, ...], torch.Tensor]) -> torch.Tensor | None:
    """States of the prompt tokens before the first recorded piece, from another request with the same tokens."""
    if not one.pieces:
        return None
    count = min(position for position, _ in one.pieces)
    same = one.prompt[:count]
    states = computed.get(one.prompt)
    if states is None:
        states = next((kept for prompt, kept in computed.items() if prompt[:count] == same), None)
    return None if states is None else states[:count]


def joined_rows(pieces: Iterable[tuple[int, torch.Tensor]], end: int) -> torch.Tensor | None:
    """States of the positions before ``end``; later pieces replace earlier ones. None if a position is missing."""
    joined: torch.Tensor | None = None
    missing = torch.ones(end, dtype=torch.bool)
    for position, states in pieces:
        high = min(position + len(states), end)
        if position < high:
            if joined is None:
                joined = states.new_empty((end, states.shape[1]))
            joined[position:high] = states[: high - position]
            missing[position:high] = False
    return None if joined is None or bool(missing.any()) else joined

"""Hidden states that an engine computed while it decoded, kept for whoever learns from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

Span = tuple[str, int, int, int]
"""Of a request's tokens in a step: its key, the first one's position and row, how many."""


@dataclass(frozen=True)
class RecordedResponse:
    """A finished response of T tokens, prompt included.

    Attributes:
        request_id: the caller's.
        prompt_length: tokens before the response.
        token_ids: T of them.
        hidden: (T', E) in bfloat16 on the host: row t is the state of token t. T' is T - 1: the last token was sampled,
            and never computed.
    """

    request_id: str
    prompt_length: int
    token_ids: tuple[int, ...]
    hidden: torch.Tensor


@dataclass
class _Recording:
    """Of one request: pieces of states by their first position, in the order in which they were computed."""

    request_id: str
    prompt: tuple[int, ...]
    response: tuple[int, ...] | None = None
    pieces: list[tuple[int, torch.Tensor]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(states.nbytes for _, states in self.pieces)

    def own(self) -> None:
        """Gives its pieces memory of their own, so that what a step computed of other requests can go."""
        self.pieces = [(position, states.clone()) for position, states in self.pieces]


class RecordedStates:
    """What an engine's steps computed of each request in a rollout, within a bound of memory.

    Where the bound is reached, half of the requests that still run are given up, the last to come first, so that some
    are whole at any length. A prompt whose beginning came from the engine's prefix cache takes that part's states from
    a request that begins with the same tokens and computed them. Responses that are not whole are left out.

    Args:
        max_bytes: that may be held.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held = 0
        self._recordings: dict[str, _Recording] = {}
        self.records = False
        """Whether a rollout is recorded now."""
        self.dropped = 0
        """Responses of the newest rollout that were given up, or were not whole."""

    @property
    def num_finished(self) -> int:
        """Responses that have ended so far; a few may turn out not to be whole."""
        return sum(one.response is not None for one in self._recordings.values())

    def begin(self) -> None:
        """A rollout begins that is to be recorded."""
        self.end()
        self.records, self.dropped = True, 0

    def end(self) -> None:
        """Nothing is recorded from here on; what there is, is forgotten."""
        self._recordings.clear()
        self._held, self.records = 0, False

    def start(self, key: str, request_id: str, prompt: Iterable[int]) -> None:
        """A request is queued, whose rows come under ``key``."""
        if self.records:
            self._recordings[key] = _Recording(request_id, tuple(prompt))

    def add(self, states: torch.Tensor, spans: Sequence[Span]) -> None:
        """Keeps rows of ``states`` (rows, E): for each span those of its tokens."""
        wanted = [span for span in spans if span[3] and span[0] in self._recordings]
        if not wanted:
            return
        picked = torch.cat([states[row : row + length] for _, _, row, length in wanted])
        on_host, row = picked.to("cpu", torch.bfloat16), 0  # a copy already, whatever its place and dtype
        for key, position, _, length in wanted:
            self._recordings[key].pieces.append((position, on_host[row : row + length]))
            row += length
        self._held += on_host.nbytes
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
        """The request has ended with this response."""
        if key in self._recordings:
            self._recordings[key].response = tuple(response)

    def forget(self, key: str) -> None:
        """The request was given up."""
        self._recordings.pop(key, None)

    def take(self, first: int = 0, every: int = 1) -> list[RecordedResponse]:
        """Of the responses that ended, each ``every``-th from ``first`` on that is whole; forgets all there is."""
        recordings = [one for one in self._recordings.values() if one.response is not None]
        self.end()
        computed: dict[tuple[int, ...], torch.Tensor] = {}  # states of whole prompts, once for each
        for one in recordings:
            if one.prompt not in computed and (states := _joined(one.pieces, len(one.prompt))) is not None:
                computed[one.prompt] = states
        found = []
        for one in recordings[first::every]:
            assert one.response is not None
            last = len(one.prompt) + len(one.response) - 1
            states = _joined(one.pieces, last)
            if states is None and (beginning := _beginning(one, computed)) is not None:
                states = _joined([(0, beginning), *one.pieces], last)
            one.pieces.clear()  # what is joined is a copy: both of all responses would be twice the bound
            if states is None or last <= len(one.prompt):
                self.dropped += states is None
                continue
            found.append(RecordedResponse(one.request_id, len(one.prompt), one.prompt + one.response, states))
        return found


def _beginning(one: _Recording, computed: dict[tuple[int, ...], torch.Tensor]) -> torch.Tensor | None:
    """The states of the tokens before its first piece, of a prompt that begins with them too."""
    if not one.pieces:
        return None
    count = min(position for position, _ in one.pieces)
    same = one.prompt[:count]
    states = computed.get(one.prompt)
    if states is None:
        states = next((kept for prompt, kept in computed.items() if prompt[:count] == same), None)
    return None if states is None else states[:count]


def _joined(pieces: Iterable[tuple[int, torch.Tensor]], end: int) -> torch.Tensor | None:
    """States of the positions before ``end``, later pieces over earlier ones; None where one is missing."""
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

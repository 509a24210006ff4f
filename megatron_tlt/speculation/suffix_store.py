"""The responses that a suffix drafter stores: a window of each problem's visits, in bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron_tlt.speculation.suffix_tree import Tokens

RESPONSE_BYTES = 200
"""Approximate Python overhead of a response."""
PROBLEM_BYTES = 500
"""Approximate Python overhead of a problem."""


@dataclass(eq=False, frozen=True, slots=True)
class StoredResponse:
    """A response to a problem, preceded by the end of its prompt.

    visit: the problem's visit, counted from 1; order: position among all responses of a store, by time of recording.
    """

    problem: str
    visit: int
    tokens: Tokens
    order: int

    @property
    def nbytes(self) -> int:
        """Memory of the response in bytes."""
        return self.tokens.nbytes + RESPONSE_BYTES


class ResponseStore:
    """Recorded responses. A visit of a problem is a rollout that recorded responses to it.

    A problem's responses are dropped ``window`` visits after their own, so a rare problem keeps its history as long as
    a frequent one. Above ``max_bytes`` the oldest visits are dropped first, starting with the least recently visited
    problem; then whole problems in that order.

    A pure function of its calls: given the same responses, it is the same on every engine.
    """

    def __init__(self, window: int, max_bytes: int) -> None:
        self._window, self._max_bytes = window, max_bytes
        self._problems: OrderedDict[str, list[StoredResponse]] = OrderedDict()  # least recently visited first
        self._next_order = 0
        self.nbytes = 0

    def __iter__(self) -> Iterator[StoredResponse]:
        """All responses, by problem: least recently visited problem first, oldest response first."""
        for responses in self._problems.values():
            yield from responses

    def __len__(self) -> int:
        """The number of problems."""
        return len(self._problems)

    def responses(self, problem: str) -> Sequence[StoredResponse]:
        """A problem's responses, oldest first."""
        return self._problems.get(problem, ())

    def newest_visit(self, problem: str) -> int:
        """A problem's last visit with responses; 0 without any."""
        responses = self._problems.get(problem)
        return responses[-1].visit if responses else 0

    def record(self, problem: str, visit: int, responses: Iterable[Tokens]) -> list[StoredResponse]:
        """Add responses of a visit, which must not be older than the newest one."""
        kept = self._problems.get(problem)
        if kept is None:
            kept = self._problems[problem] = []
            self.nbytes += PROBLEM_BYTES
        added = []
        for tokens in responses:
            added.append(StoredResponse(problem, visit, tokens, self._next_order))
            self._next_order += 1
        kept += added
        self.nbytes += sum(response.nbytes for response in added)
        self._problems.move_to_end(problem)
        return added

    def expire(self, problem: str) -> list[StoredResponse]:
        """Drop and return the responses that are outside the window in the problem's next visit."""
        return self._drop_before(problem, self.newest_visit(problem) + 1 - self._window)

    def shrink(self) -> tuple[list[StoredResponse], int]:
        """Drop responses until the rest fits; returns them and the number of problems without remaining responses."""
        dropped: list[StoredResponse] = []
        for age in range(self._window, 0, -1):
            for problem in list(self._problems):
                if self.nbytes <= self._max_bytes:
                    return dropped, 0
                dropped += self._drop_before(problem, self.newest_visit(problem) - age + 1)
        problems = 0
        for problem in list(self._problems):
            if self.nbytes <= self._max_bytes:
                break
            dropped += self._drop_before(problem, self.newest_visit(problem) + 1)
            problems += 1
        return dropped, problems

    def _drop_before(self, problem: str, visit: int) -> list[StoredResponse]:
        responses = self._problems[problem]
        if responses and responses[0].visit >= visit:
            return []
        dropped = [response for response in responses if response.visit < visit]
        if dropped:
            self._problems[problem] = responses[len(dropped) :]
            self.nbytes -= sum(response.nbytes for response in dropped)
        if not self._problems[problem]:
            del self._problems[problem]
            self.nbytes -= PROBLEM_BYTES
        return dropped

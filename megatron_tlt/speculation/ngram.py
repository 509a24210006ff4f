"""The n-gram drafter: drafts what followed the same last tokens earlier (TLT, model-free drafter per prompt)."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_tlt.config.speculation import NgramConfig
from megatron_tlt.speculation.ngram_index import NgramIndex
from megatron_tlt.speculation.suffix_tree import OutOfMemoryBudget, Tokens, as_tokens, check_tokens
from megatron_tlt.speculation.token_drafter import FinishedResponse, Proposal, no_proposal

MIN_BYTES = 1 << 20


@dataclass
class _Problem:
    index: NgramIndex
    users: int = 0


@dataclass
class _NgramRequest:
    problem: _Problem | None = None
    shared: int | None = None  # handle in the problem's index
    own: NgramIndex | None = None
    handle: int = 0


class NgramDrafter:
    """A ``TokenDrafter``: drafts what followed the latest earlier occurrence of the longest matching n-gram.

    An occurrence in the request itself is preferred; otherwise one of the same length in the other responses to its
    problem in this epoch is used.
    If memory is short, indexes of problems without running requests are dropped first, then requests' own indexes.

    Args:
        max_draft: maximum draft length.
        max_bytes: upper bound of all memory.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, config: NgramConfig | None = None, max_draft: int = 32, max_bytes: int = 1 << 28) -> None:
        config = config or NgramConfig()
        self._min_n, self._max_n = config.prompt_lookup_min, config.prompt_lookup_max
        self._max_draft, self._max_bytes = max_draft, max_bytes
        if self._min_n > self._max_n:
            raise ValueError(f"prompt_lookup_min {self._min_n}; allowed: at most prompt_lookup_max, {self._max_n}")
        for name, value, least in (("max_draft", max_draft, 1), ("max_bytes", max_bytes, MIN_BYTES)):
            if value < least:
                raise ValueError(f"{name} is {value}; allowed: {least} and more")
        self._problems: OrderedDict[str, _Problem] = OrderedDict()  # least recently used first
        self._requests: dict[str, _NgramRequest] = {}
        self._counters: Counter[str] = Counter()
        self._context = np.empty(self._max_n, np.int32)
        self._draft = np.empty(self._max_draft, np.int32)
        self._bytes = 0

    def start(self, request_id: str, problem: str, prompt: Sequence[int]) -> None:
        """See ``TokenDrafter.start``."""
        if request_id in self._requests:
            raise ValueError(f"request {request_id!r} has been started already")
        tokens = check_tokens(as_tokens(prompt))
        request = self._requests[request_id] = _NgramRequest()
        self._join_problem(request, problem)
        try:
            request.own = self._new_index()
            request.handle = request.own.start()
        except OutOfMemoryBudget:
            self._counters["own_indexes_dropped"] += 1
        self._append(request, tokens[-self._max_n :], tokens)

    def extend(self, request_id: str, tokens: Sequence[int]) -> None:
        """See ``TokenDrafter.extend``."""
        array = as_tokens(tokens)
        self._append(self._requests[request_id], array, array)

    def propose(self, request_id: str, max_tokens: int, least_probability: float = 0.0) -> Proposal:
        """See ``TokenDrafter.propose``; the score is the number of tokens, since there is no estimate."""
        request = self._requests[request_id]
        if request.own is None or max_tokens < 1:
            return no_proposal()
        known = request.own.context(request.handle, self._context)
        draft = self._draft[:max_tokens]
        others = request.problem.index if request.problem is not None else None
        for size in range(min(known, self._max_n), self._min_n - 1, -1):
            # an n-gram that is new in the request itself belongs to another response of the problem's index
            count = request.own.follow(self._context, size, draft)
            if not count and others is not None:
                count = others.follow(self._context, size, draft)
            if count:
                return Proposal(draft[:count].tolist(), float(count), size)
        return no_proposal()

    def finish(self, request_id: str) -> None:
        """See ``TokenDrafter.finish``."""
        request = self._requests.pop(request_id)
        self._drop_own(request)
        self._leave(request)

    def learn(self, problem: str, prompt: Sequence[int], response: Sequence[int]) -> None:
        """See ``TokenDrafter.learn``."""
        end = as_tokens(prompt[-self._max_n :])
        tokens = check_tokens(np.concatenate([end, as_tokens(response)]))
        request = _NgramRequest()
        self._join_problem(request, problem)
        self._append(request, tokens, tokens)
        self._leave(request)

    def begin_step(self) -> None:
        """See ``TokenDrafter.begin_step``; responses to problems with running requests are kept."""
        for key in [key for key, problem in self._problems.items() if not problem.users]:
            self._forget(key)

    def end_rollout(self, responses: Iterable[FinishedResponse]) -> None:
        """See ``TokenDrafter.end_rollout``; nothing to keep, because n-grams come from the step's own responses."""

    @property
    def memory_bytes(self) -> int:
        """Capacity of all indexes; never above ``max_bytes``."""
        return self._bytes

    def counters(self) -> dict[str, int]:
        """Evicted problems, and requests without the problem's index or without their own."""
        names = ("problems_evicted", "requests_not_recorded", "own_indexes_dropped")
        return {name: self._counters[name] for name in names}

    def _new_index(self) -> NgramIndex:
        index = NgramIndex(self._min_n, self._max_n, self._max_draft, self._allow)
        if not self._allow(index.nbytes):
            raise OutOfMemoryBudget(f"{index.nbytes} bytes for an index were refused")
        return index

    def _append(self, request: _NgramRequest, shared: Tokens, own: Tokens) -> None:
        try:
            if request.problem is not None and request.shared is not None:
                request.problem.index.append(request.shared, shared)
        except OutOfMemoryBudget:
            self._leave_problem(request)
            self._counters["requests_not_recorded"] += 1
        try:
            if request.own is not None:
                request.own.append(request.handle, own)
        except OutOfMemoryBudget:
            self._drop_own(request)
            self._counters["own_indexes_dropped"] += 1

    def _join_problem(self, request: _NgramRequest, problem: str) -> None:
        try:
            if problem not in self._problems:
                self._problems[problem] = _Problem(self._new_index())
            self._problems.move_to_end(problem)
            request.problem = self._problems[problem]
            request.problem.users += 1
            request.shared = request.problem.index.start()
        except OutOfMemoryBudget:
            self._counters["requests_not_recorded"] += 1

    def _leave(self, request: _NgramRequest) -> None:
        self._leave_problem(request)
        if request.problem is not None:
            request.problem.users -= 1

    def _leave_problem(self, request: _NgramRequest) -> None:
        if request.problem is not None and request.shared is not None:
            request.problem.index.finish(request.shared)
            request.shared = None

    def _drop_own(self, request: _NgramRequest) -> None:
        if request.own is not None:
            self._bytes -= request.own.nbytes
            request.own = None

    def _allow(self, nbytes: int) -> bool:
        for key in list(self._problems):
            if self._bytes + nbytes <= self._max_bytes:
                break
            if not self._problems[key].users:
                self._forget(key)
                self._counters["problems_evicted"] += 1
        if self._bytes + nbytes > self._max_bytes:
            return False
        self._bytes += nbytes
        return True

    def _forget(self, key: str) -> None:
        self._bytes -= self._problems.pop(key).index.nbytes

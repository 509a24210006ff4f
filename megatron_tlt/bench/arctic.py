"""Adapts arctic-inference's suffix decoding, which vLLM's method of that name uses, to our drafters' interface."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from megatron_tlt.speculation.token_drafter import FinishedResponse, Proposal

try:
    from arctic_inference.suffix_decoding import SuffixDecodingCache
    from arctic_inference.suffix_decoding._C import SuffixTree as ArcticTree
except ImportError:
    SuffixDecodingCache = ArcticTree = None


class ArcticDrafter:
    """A ``TokenDrafter`` with one cache for everything, or one per problem; nothing is ever evicted."""

    def __init__(self, max_depth: int, per_problem: bool) -> None:
        self._max_depth, self._per_problem = max_depth, per_problem
        self._caches: dict[str, Any] = {}
        self._requests: dict[str, tuple[Any, str, list[int]]] = {}
        self._number = 0

    def start(self, request_id: str, problem: str, prompt: Sequence[int]) -> None:
        """See ``TokenDrafter.start``."""
        key = problem if self._per_problem else ""
        if key not in self._caches:
            self._caches[key] = SuffixDecodingCache(self._max_depth, -1)
        self._number += 1
        unique = f"{request_id}/{self._number}"
        self._caches[key].start_request(unique, np.asarray(prompt, np.int32))
        self._requests[request_id] = (self._caches[key], unique, list(prompt))

    def extend(self, request_id: str, tokens: Sequence[int]) -> None:
        """See ``TokenDrafter.extend``."""
        cache, unique, context = self._requests[request_id]
        cache.add_active_response(unique, np.asarray(tokens, np.int32))
        context.extend(tokens)

    def propose(self, request_id: str, max_tokens: int, least_probability: float = 0.0) -> Proposal:
        """See ``TokenDrafter.propose``."""
        cache, unique, context = self._requests[request_id]
        draft = cache.speculate(unique, np.asarray(context[-self._max_depth :], np.int32), max_tokens, 1.0, 0.0, 0.1)
        return Proposal(draft.token_ids, draft.score, draft.match_len)

    def finish(self, request_id: str) -> None:
        """See ``TokenDrafter.finish``."""
        cache, unique, _ = self._requests.pop(request_id)
        cache.stop_request(unique)

    def learn(self, problem: str, prompt: Sequence[int], response: Sequence[int]) -> None:
        """See ``TokenDrafter.learn``."""
        self.start("learnt", problem, prompt)
        self.extend("learnt", response)
        self.finish("learnt")

    def begin_step(self) -> None:
        """Does nothing: this drafter has no state per step."""

    def end_rollout(self, responses: Iterable[FinishedResponse]) -> None:
        """Does nothing: this drafter has no epochs and keeps every response it decodes."""

    @property
    def memory_bytes(self) -> int:
        """Unknown for a whole cache."""
        return 0

    def counters(self) -> dict[str, int]:
        """Has no counters."""
        return {}

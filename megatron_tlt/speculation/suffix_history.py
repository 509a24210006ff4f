"""The suffix tree over the responses to a problem (or to all), built from recorded ones when a request needs it."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence

from megatron_tlt.speculation.suffix_store import PROBLEM_BYTES, RESPONSE_BYTES, StoredResponse
from megatron_tlt.speculation.suffix_tree import OutOfMemoryBudget, SuffixTree, Tokens

_MANTISSA = 1 << 12
_SCALE_AT = 512


class EpochWeights:
    """Weights by epoch: an epoch weighs ``1 / decay`` times the one before it, so that older weights never change.

    Every weight is a power of two times a 12-bit number, whatever the epoch, so sums over a window are exact.
    """

    def __init__(self, decay: float) -> None:
        """``decay`` must be above 0 and at most 1."""
        self._bits = -math.log2(decay)

    def exponent(self, epoch: int) -> int:
        """The exponent of two in an epoch's weight."""
        return math.floor(epoch * self._bits)

    def weight(self, epoch: int, exponent: int) -> float:
        """An epoch's weight divided by ``2**exponent``."""
        whole = self.exponent(epoch)
        mantissa = round(2.0 ** (epoch * self._bits - whole) * _MANTISSA) / _MANTISSA
        return math.ldexp(mantissa, whole - exponent)


class ResponseTree:
    """A suffix tree over recorded responses and those of the running rollout, each weighted by its epoch.

    Recorded responses are added when a request starts, at about a microsecond per token; the store owns their tokens.
    Responses of the running rollout are only in this tree until ``record``. The owner maintains ``users`` and
    ``accounted``.
    """

    def __init__(
        self,
        weights: EpochWeights,
        max_depth: int,
        epoch_of: Callable[[StoredResponse], int],
        allow: Callable[[ResponseTree, int], bool],
        counters: Counter[str],
    ) -> None:
        """``allow`` is called before the tree grows, as in ``SuffixTree``; ``counters`` count what did not fit."""
        self._weights = weights
        self._max_depth = max_depth
        self._epoch_of = epoch_of
        self._allow = allow
        self._counters = counters
        self.tree: SuffixTree | None = None
        self._limit: int | None = None  # of ``nbytes``, while recorded responses are added
        self._waiting: list[StoredResponse] = []  # to be added to the tree, if there is one
        self._recorded: dict[StoredResponse, int] = {}  # handles
        # of the running rollout, with their epochs: handles of growing and ended responses, and those in no tree
        self._growing: dict[int, int] = {}
        self._ended: dict[int, int] = {}
        self._outside: list[tuple[int, Tokens]] = []
        self._exponent: int | None = None  # weights in the tree are divided by 2 to this power
        self.users = 0
        self.accounted = 0

    @property
    def empty(self) -> bool:
        """Whether it holds no response."""
        return not (self._recorded or self._waiting or self._growing or self._ended or self._outside)

    @property
    def nbytes(self) -> int:
        """Memory of the tree, and of the running rollout's tokens outside the tree."""
        if self.tree is None and not self._outside:
            return 0
        outside = sum(tokens.nbytes + RESPONSE_BYTES for _, tokens in self._outside)
        return PROBLEM_BYTES + outside + (self.tree.nbytes if self.tree is not None else 0)

    @property
    def mostly_free(self) -> bool:
        """Whether removed responses occupy more of its memory than the present ones."""
        return self.tree is not None and 2 * self.tree.num_nodes < self.tree.node_capacity

    def update(self, newest_first: Callable[[], Sequence[StoredResponse]], limit: int) -> None:
        """Add all responses to the tree, or the newest ones that fit within ``limit`` bytes.

        ``newest_first`` returns the stored responses, to build a missing tree.

        Raises:
            OutOfMemoryBudget: there is no room for an empty tree.
        """
        if self.tree is not None and not (self._waiting or self._outside):
            return
        waiting: Sequence[StoredResponse] = sorted(self._waiting, key=lambda response: -response.order)
        if self.tree is None:
            tree = SuffixTree(self._max_depth, self._granted)
            if not self._granted(tree.nbytes + PROBLEM_BYTES):
                raise OutOfMemoryBudget(f"{tree.nbytes} bytes for a tree were refused")
            self.tree, self._exponent = tree, None
            waiting = newest_first()
        self._waiting, outside, self._outside = [], self._outside, []
        self._limit = limit
        try:
            for epoch, tokens in outside:
                handle = self._insert(epoch, tokens, None)
                if handle is not None:
                    self._ended[handle] = epoch
            for done, response in enumerate(waiting):
                handle = self._insert(self._epoch_of(response), response.tokens, response.order)
                if handle is None:
                    self._counters["responses_left_out"] += len(waiting) - done
                    break
                self._recorded[response] = handle
        finally:
            self._limit = None

    def _insert(self, epoch: int, tokens: Tokens, order: int | None) -> int | None:
        """Add a finished response, replacing older recorded ones if there is no room; None if it does not fit."""
        assert self.tree is not None
        while True:
            handle = None
            try:
                handle = self.start(epoch)
                self.tree.append(handle, tokens)
                self.tree.finish(handle)
                del self._growing[handle]
                return handle
            except OutOfMemoryBudget:
                if handle is not None:
                    self.discard(handle)
                if not self.shed(order):
                    return None

    def _granted(self, nbytes: int) -> bool:
        if self._limit is None:
            return self._allow(self, nbytes)
        return self.nbytes + nbytes <= self._limit and self._allow(self, nbytes)

    @property
    def inserting(self) -> bool:
        """Whether it is adding past responses, which have a lower claim to memory than a request."""
        return self._limit is not None

    def release(self) -> None:
        """Drop the tree; no response may be growing."""
        assert not self._growing
        if self.tree is not None:
            self._outside += [(epoch, self.tree.tokens(handle)) for handle, epoch in self._ended.items()]
            self.tree = None
            self._ended, self._recorded, self._waiting = {}, {}, []

    def keep(self, epoch: int, tokens: Tokens) -> None:
        """Keep a finished response of the running rollout; it is added to the tree when a request next starts."""
        self._outside.append((epoch, tokens))

    def start(self, epoch: int) -> int:
        """Start a response in the tree, which must exist.

        Raises:
            OutOfMemoryBudget: there is no room.
        """
        assert self.tree is not None
        exponent = self._weights.exponent(epoch)
        if self._exponent is None:
            self._exponent = exponent
        if abs(exponent - self._exponent) > _SCALE_AT:
            self.tree.scale(math.ldexp(1.0, self._exponent - exponent))
            self._exponent = exponent
        handle = self.tree.start(self._weights.weight(epoch, self._exponent))
        self._growing[handle] = epoch
        return handle

    def finish(self, handle: int) -> None:
        """End a response in the tree.

        Raises:
            OutOfMemoryBudget: there is no room; the response remains growing.
        """
        assert self.tree is not None
        self.tree.finish(handle)
        self._ended[handle] = self._growing.pop(handle)

    def discard(self, handle: int) -> None:
        """Remove a growing response."""
        assert self.tree is not None
        self.tree.remove([handle])
        del self._growing[handle]

    def record(self, responses: Iterable[StoredResponse]) -> None:
        """Record the responses of the finished rollout, and remove its other additions from the tree.

        Responses already in the tree are recognised by their tokens.
        """
        if self.tree is not None:
            handles = defaultdict(list)
            for handle in self._ended:
                handles[self.tree.tokens(handle).tobytes()].append(handle)
            for response in responses:
                same = handles[response.tokens.tobytes()]
                if same:
                    self._recorded[response] = same.pop()
                else:
                    self._waiting.append(response)
            self.tree.remove([handle for left in handles.values() for handle in left])
        self._ended, self._outside = {}, []

    def drop(self, responses: Collection[StoredResponse]) -> None:
        """Remove responses from the tree that the store has dropped."""
        if self.tree is not None and responses:
            gone = set(responses)
            self._waiting = [response for response in self._waiting if response not in gone]
            # In the given order: the trees of all ranks of an engine must have the same layout.
            self.tree.remove([self._recorded.pop(response) for response in responses if response in self._recorded])

    def reweigh(self, responses: Collection[StoredResponse]) -> None:
        """Add responses to the tree again after the weights of their epochs changed."""
        if self.tree is not None:
            self.drop(responses)
            self._waiting += responses

    def shed(self, before: int | None = None) -> int:
        """Remove the oldest responses, at least an eighth of the tree's tokens; returns their number.

        With ``before``, only recorded responses of a lower order; without, also those that ended in this rollout.
        """
        if self.tree is None:
            return 0
        wanted, handles = self.tree.num_tokens // 8, []
        for response in sorted(self._recorded, key=lambda response: response.order):
            if wanted < 0 or (before is not None and response.order >= before):
                break
            handles.append(self._recorded.pop(response))
            wanted -= self.tree.length(handles[-1])
        for handle in list(self._ended) if before is None else ():
            if wanted < 0:
                break
            del self._ended[handle]
            handles.append(handle)
            wanted -= self.tree.length(handle)
        self.tree.remove(handles)
        self._counters["responses_left_out"] += len(handles)
        return len(handles)

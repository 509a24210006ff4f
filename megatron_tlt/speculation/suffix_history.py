"""What a problem's responses were over the epochs: a suffix tree while it is in use, bare tokens otherwise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from megatron_tlt.speculation.suffix_tree import SEQUENCE_BYTES, OutOfMemoryBudget, SuffixTree, Tokens

_MANTISSA = 1 << 12
_SCALE_AT = 512
PROBLEM_BYTES = 1000
"""What Python keeps for a problem, roughly."""
MIN_WEIGHT = 2.0**-12
"""Of the window's oldest epoch over its newest: within that range sums of weights are exact in float64."""


class EpochWeights:
    """An epoch weighs ``1 / decay`` of the one before it, so that the past need not be touched.

    Every weight is a power of two times a number of 12 bits, whatever the epoch: sums over a window are exact.
    """

    def __init__(self, decay: float) -> None:
        """``decay`` above 0, at most 1."""
        self._bits = -math.log2(decay)

    def exponent(self, epoch: int) -> int:
        """The power of two in an epoch's weight."""
        return math.floor(epoch * self._bits)

    def weight(self, epoch: int, exponent: int) -> float:
        """An epoch's weight over ``2**exponent``."""
        whole = self.exponent(epoch)
        mantissa = round(2.0 ** (epoch * self._bits - whole) * _MANTISSA) / _MANTISSA
        return math.ldexp(mantissa, whole - exponent)


class ProblemHistory:
    """Responses of one problem with their epochs, oldest first; ``users`` and ``accounted`` are the owner's to keep.

    ``warm`` builds the tree, at about a microsecond a token; ``cool`` gives it up and keeps the tokens, which take a
    tenth of the memory or less.
    """

    def __init__(self, weights: EpochWeights, max_depth: int, allow: Callable[[ProblemHistory, int], bool]) -> None:
        """``allow`` is asked before the tree grows, as by ``SuffixTree``."""
        self._weights = weights
        self._max_depth = max_depth
        self._allow = allow
        self.tree: SuffixTree | None = None
        self._cold: list[tuple[int, Tokens]] = []
        self._ended: dict[int, int] = {}  # handle to epoch
        self._growing: dict[int, int] = {}
        self._exponent: int | None = None  # weights in the tree are over 2 to this
        self.users = 0
        self.accounted = 0

    @property
    def empty(self) -> bool:
        """Whether there is nothing in it."""
        return not (self._cold or self._ended or self._growing)

    @property
    def nbytes(self) -> int:
        """Memory of tokens and tree."""
        if self.empty and self.tree is None:
            return 0
        cold = sum(tokens.nbytes + SEQUENCE_BYTES for _, tokens in self._cold)
        return PROBLEM_BYTES + cold + (self.tree.nbytes if self.tree is not None else 0)

    @property
    def oldest_epoch(self) -> int | None:
        """Of the responses that have ended; None without any."""
        return min([*(epoch for epoch, _ in self._cold), *self._ended.values()], default=None)

    def sequences(self) -> Iterator[tuple[int, Tokens]]:
        """Epoch and tokens of every response that has ended."""
        yield from self._cold
        for handle, epoch in self._ended.items():
            assert self.tree is not None
            yield epoch, self.tree.tokens(handle)

    def add(self, epoch: int, tokens: Tokens) -> None:
        """A response that ended elsewhere; only while there is no tree."""
        assert self.tree is None
        self._cold.append((epoch, tokens))

    def warm(self) -> SuffixTree:
        """The tree of all responses, or of the newest that there is room for.

        Raises:
            OutOfMemoryBudget: there is not even room for one.
        """
        if self.tree is None:
            tree = SuffixTree(self._max_depth, lambda nbytes: self._allow(self, nbytes))
            if not self._allow(self, tree.nbytes + PROBLEM_BYTES):
                raise OutOfMemoryBudget(f"{tree.nbytes} bytes for a tree were refused")
            self.tree, self._exponent = tree, None
            self._cold.reverse()
            try:
                while self._cold:
                    epoch, tokens = self._cold.pop()
                    handle = self.start(epoch)
                    self.tree.append(handle, tokens)
                    self.finish(handle)
            except OutOfMemoryBudget:
                self.tree, self._ended, self._growing = None, {}, {}
                raise
            finally:
                self._cold.reverse()
        return self.tree

    def cool(self) -> None:
        """Gives up the tree; nothing may grow."""
        assert not self._growing
        if self.tree is not None:
            self._cold = list(self.sequences())
            self.tree = None
            self._ended = {}

    def start(self, epoch: int) -> int:
        """Begins a response in the tree.

        Raises:
            OutOfMemoryBudget: there is no room.
        """
        tree = self.warm()
        exponent = self._weights.exponent(epoch)
        if self._exponent is None:
            self._exponent = exponent
        if abs(exponent - self._exponent) > _SCALE_AT:
            tree.scale(math.ldexp(1.0, self._exponent - exponent))
            self._exponent = exponent
        handle = tree.start(self._weights.weight(epoch, self._exponent))
        self._growing[handle] = epoch
        return handle

    def finish(self, handle: int) -> None:
        """Ends a response in the tree.

        Raises:
            OutOfMemoryBudget: there is no room; the response still grows.
        """
        assert self.tree is not None
        self.tree.finish(handle)
        self._ended[handle] = self._growing.pop(handle)

    def discard(self, handle: int) -> None:
        """Takes a growing response away."""
        assert self.tree is not None
        self.tree.remove([handle])
        del self._growing[handle]

    def drop_before(self, epoch: int) -> int:
        """Takes away the ended responses of earlier epochs; gives how many."""
        cold = [entry for entry in self._cold if entry[0] >= epoch]
        handles = [handle for handle, old in self._ended.items() if old < epoch]
        dropped = len(self._cold) - len(cold) + len(handles)
        self._cold = cold
        self._remove(handles)
        return dropped

    def shed(self) -> int:
        """Takes away the oldest ended responses of the tree, an eighth of its tokens or more; gives how many."""
        if self.tree is None:
            return 0
        wanted, handles = self.tree.num_tokens // 8, []
        for handle in self._ended:
            if wanted < 0:
                break
            handles.append(handle)
            wanted -= self.tree.length(handle)
        self._remove(handles)
        return len(handles)

    def _remove(self, handles: list[int]) -> None:
        if handles:
            assert self.tree is not None
            self.tree.remove(handles)
            for handle in handles:
                del self._ended[handle]

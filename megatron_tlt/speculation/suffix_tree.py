"""A depth-limited suffix tree over growing token sequences, with exact weighted counts and removal."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from megatron_tlt.speculation import suffix_kernels as kernels
from megatron_tlt.speculation import suffix_nodes as nodes
from megatron_tlt.speculation.growing_array import GrowingArray
from megatron_tlt.speculation.token_drafter import Proposal, no_proposal

Tokens: TypeAlias = NDArray[np.int32]

MAX_TOKEN = nodes.TERMINATOR - 1
SEQUENCE_BYTES = 400
"""Approximate Python overhead of a sequence."""
_FIRST_NODES = 256
_GROWTH = 1.25


class OutOfMemoryBudget(Exception):
    """A tree was refused the bytes that it needs to grow."""


@dataclass(frozen=True)
class SpeculationRule:
    """DAS's limits: at most ``factor * match + offset`` tokens after a match, of at least this joint probability."""

    factor: float = 1.0
    offset: float = 0.0
    min_probability: float = 0.1

    def __post_init__(self) -> None:
        """Raise ValueError for meaningless bounds."""
        if not (self.factor >= 0.0 and self.factor + self.offset >= 1.0):
            raise ValueError(
                f"factor {self.factor}, offset {self.offset}: allowed: a factor of 0 and more, a sum of 1 and more"
            )
        if not 0.0 <= self.min_probability <= 1.0:
            raise ValueError(f"min_probability is {self.min_probability}; allowed: 0 to 1")


@dataclass
class _Sequence:
    block: int
    length: int
    weight: float
    slot: int  # -1 after its end


class SuffixTree:
    """Counts of every string of up to ``max_depth`` tokens in its sequences, each occurrence weighted by its sequence.

    The token after a growing sequence's end is unknown, so the end counts for no continuation. ``allow(nbytes)`` is
    called before arrays grow and may refuse; it may remove ended sequences to make room in them. Counts are exact if
    sums of the weights are exact in float64 (powers of two, or few significant bits over a small range).
    """

    def __init__(self, max_depth: int = 32, allow: Callable[[int], bool] | None = None) -> None:
        """Raise ValueError if ``max_depth`` is out of range."""
        if not 2 <= max_depth <= 1024:
            raise ValueError(f"max_depth is {max_depth}; allowed: 2 to 1024")
        self.max_depth = max_depth
        self._allow = allow
        self._stride = nodes.BLOCK_HEADER + 3 * max_depth
        self._header = np.zeros(nodes.HEADER, np.int64)
        ring = 1 << (max_depth - 1).bit_length()
        self._header[: nodes.STRIDE + 1] = (max_depth, ring, 2 * max_depth, self._stride)
        self._header[[nodes.TOP_NODE, nodes.LIVE_NODES]] = 1
        self._header[nodes.FREE_BLOCK] = nodes.NONE
        self._nodes = GrowingArray(max(_FIRST_NODES, 4 * max_depth), nodes.NODE)
        self._nodes.array[nodes.ROOT]["best"] = nodes.NONE
        self._table = GrowingArray(_table_size(len(self._nodes.array)), np.int32)
        self._text = GrowingArray(2 * self._stride, np.int32)
        self._slots = np.zeros(1, nodes.SLOT)
        self._loci = np.zeros((1, 3, ring), np.int32)
        self._best = np.empty(max_depth, np.int32)
        self._scratch = np.empty(max_depth, np.int32)
        self._sequences: dict[int, _Sequence] = {}
        self._handles = itertools.count()
        self.num_tokens = 0

    @property
    def nbytes(self) -> int:
        """Memory of the tree by capacity."""
        arrays = (
            self._header,
            self._nodes.array,
            self._table.array,
            self._text.array,
            self._slots,
            self._loci,
            self._best,
            self._scratch,
        )
        return sum(array.nbytes for array in arrays) + SEQUENCE_BYTES * len(self._sequences)

    @property
    def num_nodes(self) -> int:
        """Number of nodes in use, the root included."""
        return int(self._header[nodes.LIVE_NODES])

    @property
    def node_capacity(self) -> int:
        """Number of nodes that fit in the allocated memory."""
        return len(self._nodes.array)

    @property
    def _arrays(self) -> tuple[np.ndarray, ...]:
        return self._nodes.array, self._table.array, self._text.array, self._loci, self._slots, self._header

    def start(self, weight: float = 1.0) -> int:
        """Start an empty sequence and return its handle.

        Raises:
            ValueError: the weight is not positive.
            OutOfMemoryBudget: ``allow`` refused.
        """
        if not weight > 0.0:
            raise ValueError(f"weight is {weight}; allowed: above 0")
        while not self._granted(SEQUENCE_BYTES):
            pass
        free = np.flatnonzero(self._slots["active"] == 0)
        slot = int(free[0]) if len(free) else len(self._slots)
        if slot == len(self._slots):
            more = len(self._slots) * (nodes.SLOT.itemsize + self._loci[0].nbytes)
            while not self._granted(more):
                pass
            self._slots.resize(2 * len(self._slots), refcheck=False)
            self._loci.resize((len(self._slots), *self._loci.shape[1:]), refcheck=False)
        self._slots[slot] = (weight, 0, 0, nodes.NONE, nodes.NONE, nodes.NONE, 1)
        handle = next(self._handles)
        self._sequences[handle] = _Sequence(nodes.NONE, 0, weight, slot)
        return handle

    def append(self, handle: int, tokens: Sequence[int] | Tokens) -> None:
        """Append tokens to a growing sequence.

        Raises:
            KeyError: the sequence does not exist or has ended.
            ValueError: a token below 0 or above MAX_TOKEN; nothing is appended.
            OutOfMemoryBudget: ``allow`` refused; some tokens may be appended.
        """
        array = as_tokens(tokens)
        sequence = self._growing(handle)
        done = 0
        while True:
            before = done
            done = kernels.append(*self._arrays, sequence.slot, array, done)
            if done < 0:
                check_tokens(array)  # raises
            if done > before:
                sequence.length += done - before
                self.num_tokens += done - before
                if sequence.block == nodes.NONE:
                    sequence.block = int(self._slots["first"][sequence.slot])
            if done == len(array):
                return
            self._grow()

    def finish(self, handle: int) -> None:
        """End a growing sequence: nothing follows it.

        Raises:
            KeyError: the sequence does not exist or has ended.
            OutOfMemoryBudget: ``allow`` refused; the sequence remains growing.
        """
        sequence = self._growing(handle)
        while not kernels.finish(*self._arrays, sequence.slot):
            self._grow()
        sequence.slot = -1

    def remove(self, handles: Iterable[int]) -> None:
        """Remove sequences, also growing ones, as if they had never existed.

        Raises:
            KeyError: one of them does not exist; none is removed.
        """
        taken = {handle: self._sequences[handle] for handle in handles}
        for handle, sequence in taken.items():
            ended = sequence.slot < 0
            if not ended:
                self._slots[sequence.slot]["active"] = 0
            kernels.remove(*self._arrays, sequence.block, sequence.length, int(ended), sequence.weight)
            self.num_tokens -= sequence.length
            del self._sequences[handle]
        if taken:
            kernels.sweep(self._nodes.array, self._text.array, self._loci, self._slots, self._header)

    def length(self, handle: int) -> int:
        """A sequence's number of tokens; raises KeyError if it does not exist."""
        return self._sequences[handle].length

    def tokens(self, handle: int) -> Tokens:
        """A copy of a sequence's tokens.

        Raises:
            KeyError: the sequence does not exist.
        """
        sequence = self._sequences[handle]
        starts = 2 * self.max_depth
        result = np.empty(sequence.length, np.int32)
        block = sequence.block
        for begin in range(0, sequence.length, starts):
            part = result[begin : begin + starts]
            at = block * self._stride + nodes.BLOCK_HEADER
            part[:] = self._text.array[at : at + len(part)]
            block = int(self._text.array[block * self._stride])
        return result

    def propose(self, handle: int, max_tokens: int, rule: SpeculationRule) -> Proposal:
        """The draft with the highest score among those after every match of a growing sequence's end.

        A match of m tokens is followed along the heaviest children, ties to the smaller id, for at most
        ``min(max_tokens, rule.factor * m + rule.offset, max_depth - m)`` tokens (DAS, suffix-tree drafter).
        Probabilities are over occurrences whose next token is known. Among equal scores the longer match wins.

        Raises:
            KeyError: the sequence does not exist or has ended.
        """
        sequence = self._growing(handle)
        count, score, matched = kernels.propose(
            self._nodes.array,
            self._text.array,
            self._loci,
            self._slots,
            self._header,
            sequence.slot,
            min(max_tokens, self.max_depth),
            rule.factor,
            rule.offset,
            rule.min_probability,
            self._best,
            self._scratch,
        )
        return Proposal(self._best[:count].tolist(), score, matched) if count else no_proposal()

    def count(self, tokens: Sequence[int] | Tokens) -> float:
        """Weight of all occurrences of a string of 1 to ``max_depth`` tokens.

        Raises:
            ValueError: the string's length is out of range.
        """
        array = as_tokens(tokens)
        if not 1 <= len(array) <= self.max_depth:
            raise ValueError(f"{len(array)} tokens; allowed: 1 to {self.max_depth}")
        node = kernels.locate(self._nodes.array, self._table.array, self._text.array, self._header, array)
        if node == nodes.ROOT:
            return 0.0
        upper = int(self._nodes.array[self._nodes.array[node]["parent"]]["depth"])
        # growing windows that end on the edge above this point have entered the edge, but lack the whole string (a
        # window alone on its leaf holds all known tokens)
        shorter = nodes.growing_weight(
            self._loci, self._slots, self._header, node, upper + 1, len(array) - 1, nodes.NONE
        )
        return float(self._nodes.array[node]["count"]) - shorter

    def scale(self, factor: float) -> None:
        """Multiply all weights; exact for powers of two."""
        kernels.scale(self._nodes.array, self._slots, self._header, factor)
        for sequence in self._sequences.values():
            sequence.weight *= factor

    def _growing(self, handle: int) -> _Sequence:
        sequence = self._sequences[handle]
        if sequence.slot < 0:
            raise KeyError(f"sequence {handle} has ended")
        return sequence

    def _needs_nodes(self) -> bool:
        return self.num_nodes + 2 * self.max_depth > len(self._nodes.array)

    def _needs_blocks(self) -> bool:
        return (self._header[nodes.LIVE_BLOCKS] + 1) * self._stride > len(self._text.array)

    def _grow(self) -> None:
        """Enlarge arrays that are nearly full, in place, so that large arrays are remapped and never exist twice."""
        while self._needs_nodes():
            size = int(len(self._nodes.array) * _GROWTH) + 1
            table = _table_size(size)
            more = (size - len(self._nodes.array)) * nodes.NODE.itemsize + 4 * (table - len(self._table.array))
            if self._granted(more):
                self._nodes.grow(size)
                if table != len(self._table.array):
                    self._table = GrowingArray(0, np.int32)  # free the old table before allocating the new
                    self._table = GrowingArray(table, np.int32)
                    kernels.rebuild_table(self._nodes.array, self._table.array, self._header)
        while self._needs_blocks():
            more = max(1, int(len(self._text.array) // self._stride * (_GROWTH - 1.0))) * self._stride
            if self._granted(4 * more):
                self._text.grow(len(self._text.array) + more)

    def _granted(self, nbytes: int) -> bool:
        """Whether the arrays may grow; if not, sequences were removed and their room may be reused.

        Raises:
            OutOfMemoryBudget: the arrays may not grow, and no sequence was removed.
        """
        before = len(self._sequences)
        if self._allow is None or self._allow(nbytes):
            return True
        if len(self._sequences) == before:
            raise OutOfMemoryBudget(f"{nbytes} bytes more were refused")
        return False


def as_tokens(tokens: Sequence[int] | Tokens) -> Tokens:
    """Convert to an int32 array of tokens.

    Raises:
        ValueError: a token is out of range.
    """
    try:
        return np.ascontiguousarray(tokens, np.int32)
    except OverflowError as error:
        raise ValueError(f"token ids up to {max(tokens)}; allowed: 0 to {MAX_TOKEN}") from error


def check_tokens(tokens: Tokens) -> Tokens:
    """Return the tokens after a range check.

    Raises:
        ValueError: a token is below 0 or above MAX_TOKEN.
    """
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() <= MAX_TOKEN:
        raise ValueError(f"token ids from {tokens.min()} to {tokens.max()}; allowed: 0 to {MAX_TOKEN}")
    return tokens


def _table_size(nodes: int) -> int:
    """The smallest power of two that is filled to at most three quarters."""
    return 1 << (nodes * 4 // 3).bit_length()

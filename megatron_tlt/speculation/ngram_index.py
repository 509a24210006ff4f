"""Index of the latest occurrence of each n-gram in growing sequences, and of the tokens after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from megatron_tlt.speculation import ngram_kernels as kernels
from megatron_tlt.speculation import suffix_nodes as nodes
from megatron_tlt.speculation.growing_array import GrowingArray
from megatron_tlt.speculation.suffix_tree import OutOfMemoryBudget, Tokens, as_tokens, check_tokens

_FIRST_ENTRIES = 256


class NgramIndex:
    """Latest occurrences of all n-grams of ``least`` to ``most`` tokens that are followed by a token."""

    def __init__(self, least: int, most: int, max_draft: int, allow: Callable[[int], bool] | None = None) -> None:
        """``allow(nbytes)`` is called before arrays grow and may refuse."""
        self._least, self._allow = least, allow
        span = most + max_draft
        stride = nodes.BLOCK_HEADER + 3 * span
        self._header = np.zeros(nodes.HEADER, np.int64)
        ring = 1 << (most - 1).bit_length()
        self._header[: nodes.STRIDE + 1] = (span, ring, 2 * span, stride)
        self._header[nodes.FREE_BLOCK] = nodes.NONE
        self._text = GrowingArray(2 * stride, np.int32)
        self._table = np.full((most - least + 1, _FIRST_ENTRIES), nodes.NONE, np.int32)
        self._entries = np.zeros(len(self._table), np.int64)
        self._slots = np.zeros(1, nodes.SLOT)
        self._begins = np.zeros((1, ring), np.int32)
        self.num_tokens = 0

    @property
    def nbytes(self) -> int:
        """Memory of the index by capacity."""
        arrays = (self._header, self._text.array, self._table, self._entries, self._slots, self._begins)
        return sum(array.nbytes for array in arrays)

    def start(self) -> int:
        """Start an empty sequence; returns its handle, valid until the sequence ends.

        Raises:
            OutOfMemoryBudget: ``allow`` refused.
        """
        free = np.flatnonzero(self._slots["active"] == 0)
        slot = int(free[0]) if len(free) else len(self._slots)
        if slot == len(self._slots):
            self._ask(len(self._slots) * (nodes.SLOT.itemsize + self._begins[0].nbytes))
            self._slots.resize(2 * len(self._slots), refcheck=False)
            self._begins.resize((len(self._slots), self._begins.shape[1]), refcheck=False)
        self._slots[slot] = (1.0, 0, 0, nodes.NONE, nodes.NONE, nodes.NONE, 1)
        return slot

    def append(self, handle: int, tokens: Sequence[int] | Tokens) -> None:
        """Append tokens to a growing sequence.

        Raises:
            ValueError: a token is out of range; nothing is appended.
            OutOfMemoryBudget: ``allow`` refused; some tokens may be appended.
        """
        array = as_tokens(tokens)
        done = 0
        while True:
            before = done
            done = kernels.append(
                self._text.array,
                self._table,
                self._entries,
                self._begins,
                self._slots,
                self._header,
                handle,
                array,
                done,
                self._least,
            )
            if done < 0:
                check_tokens(array)  # raises
            self.num_tokens += done - before
            if done == len(array):
                return
            self._grow()

    def finish(self, handle: int) -> None:
        """End a growing sequence; its n-grams stay in the index."""
        kernels.finish(self._text.array, self._slots, self._header, handle)

    def context(self, handle: int, out: Tokens) -> int:
        """Copy a growing sequence's last tokens to the end of ``out``; returns their number."""
        return int(kernels.last_tokens(self._text.array, self._begins, self._slots, self._header, handle, out))

    def follow(self, context: Tokens, size: int, out: Tokens) -> int:
        """Write the tokens after the latest occurrence of the context's last ``size`` tokens; returns their number."""
        return int(kernels.follow(self._text.array, self._table, self._header, context, size, self._least, out))

    def _ask(self, nbytes: int) -> None:
        if self._allow is not None and not self._allow(nbytes):
            raise OutOfMemoryBudget(f"{nbytes} bytes more were refused")

    def _grow(self) -> None:
        """Enlarge the arrays that are nearly full."""
        if 4 * (int(self._entries.max()) + 1) > 3 * self._table.shape[1]:
            self._ask(self._table.nbytes)
            larger = np.full((len(self._table), 2 * self._table.shape[1]), nodes.NONE, np.int32)
            kernels.rehash(self._text.array, self._table, larger, self._least)
            self._table = larger
        stride = int(self._header[nodes.STRIDE])
        if (self._header[nodes.LIVE_BLOCKS] + 1) * stride > len(self._text.array):
            more = max(1, len(self._text.array) // stride // 4) * stride
            self._ask(4 * more)
            self._text.grow(len(self._text.array) + more)

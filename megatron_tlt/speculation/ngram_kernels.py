"""Inner loops of the n-gram index, compiled by numba; ``ngram_index.NgramIndex`` owns the arrays.

Text is stored in blocks as in the suffix tree (``suffix_nodes``), so an n-gram and its continuation are contiguous.
Row i of ``table`` is an open hash table of the n-grams of ``least + i`` tokens with the start of the latest occurrence.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from megatron_tlt.speculation.suffix_nodes import (
    LIVE_BLOCKS,
    NONE,
    RING,
    STRIDE,
    TERMINATOR,
    UNWRITTEN,
    write_token,
)


@njit
def _place(text, row, tokens, begin, size):
    """Index of the n-gram ``tokens[begin : begin + size]`` in a row, or the free slot for it."""
    mixed = np.uint64(size)
    for i in range(begin, begin + size):
        mixed = (mixed ^ np.uint64(tokens[i])) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(32)
    place = np.int64(mixed & np.uint64(len(row) - 1))
    while row[place] != NONE:
        at = row[place]
        same = 0
        while same < size and text[at + same] == tokens[begin + same]:
            same += 1
        if same == size:
            break
        place = (place + 1) & (len(row) - 1)
    return place


@njit(cache=True)
def append(text, table, entries, begins, slots, header, slot, tokens, done, least):
    """Append ``tokens[done:]`` to a growing sequence; returns how many are appended when the arrays are full.

    Returns -1 and appends nothing if a token is out of range. ``begins[slot]`` is a ring of token positions.
    """
    for i in range(done, len(tokens)):
        if tokens[i] < 0 or tokens[i] == TERMINATOR:
            return -1
    mask = header[RING] - 1
    spare_blocks = len(text) // header[STRIDE]
    for i in range(done, len(tokens)):
        if header[LIVE_BLOCKS] >= spare_blocks or 4 * (entries.max() + 1) > 3 * table.shape[1]:
            return i
        here = write_token(text, slots, header, slot, tokens[i])
        length = slots[slot].length
        for kind in range(len(entries)):  # the n-grams before this token, whose next token is now known
            size = least + kind
            if length < size:
                break
            at = begins[slot, (length - size) & mask]
            place = _place(text, table[kind], text, at, size)
            if table[kind, place] == NONE:
                entries[kind] += 1
            table[kind, place] = at
        begins[slot, length & mask] = here
        slots[slot].length = length + 1
    return len(tokens)


@njit(cache=True)
def finish(text, slots, header, slot):
    """End a sequence."""
    if slots[slot].length > 0:
        write_token(text, slots, header, slot, TERMINATOR)
    slots[slot].active = 0


@njit(cache=True)
def last_tokens(text, begins, slots, header, slot, out):
    """Copy the end of a growing sequence to the end of ``out``; returns the number of tokens."""
    mask = header[RING] - 1
    length = slots[slot].length
    count = min(length, len(out))
    for i in range(1, count + 1):
        out[len(out) - i] = text[begins[slot, (length - i) & mask]]
    return count


@njit(cache=True)
def follow(text, table, header, context, size, least, out):
    """Tokens after the latest n-gram that equals the context's last ``size`` tokens; returns their number."""
    row = table[size - least]
    at = row[_place(text, row, context, len(context) - size, size)]
    if at == NONE:
        return 0
    end = (at // header[STRIDE] + 1) * header[STRIDE]
    count = 0
    while count < len(out) and at + size + count < end:
        token = text[at + size + count]
        if token == UNWRITTEN or token == TERMINATOR:
            break
        out[count] = token
        count += 1
    return count


@njit(cache=True)
def rehash(text, old, new, least):
    """Move every n-gram to an empty, larger table."""
    for kind in range(old.shape[0]):
        for at in old[kind]:
            if at != NONE:
                new[kind, _place(text, new[kind], text, at, least + kind)] = at

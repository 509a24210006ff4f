"""Inner loops of the suffix tree, compiled by numba; ``suffix_tree.SuffixTree`` owns the arrays.

The tree is a compact trie of every window of up to ``max_depth`` tokens that begins anywhere in a sequence. A growing
sequence has a window per length below ``max_depth``. Each has a locus: the node on whose edge it ends. They are the
matches of the sequence's own suffixes, so a proposal needs no search.

A window changes counts only when it passes a node's end. If the longest one finds its token already there, so do all
shorter ones. A window alone on its own leaf needs no work until another window enters the leaf: its locus is ``~leaf``,
and the leaf's ``total`` identifies it. A token's cost is therefore that of the few windows at branchings.
"""

from __future__ import annotations

from numba import njit

from megatron_tlt.speculation.suffix_nodes import (
    AT_NODE,
    BEGINS,
    BLOCK_HEADER,
    ENDS,
    FREE_BLOCK,
    FREED,
    IN_USE,
    LIVE_BLOCKS,
    LIVE_NODES,
    MAX_DEPTH,
    NONE,
    REFERENCED,
    REMOVED,
    RING,
    ROOT,
    STALE,
    STARTS,
    STRIDE,
    TERMINATOR,
    TOP_BLOCK,
    TOP_NODE,
    UNWRITTEN,
    add_leaf,
    best_child,
    enter,
    find_child,
    gained,
    remove_leaf,
    retire,
    share,
    split,
    write_token,
)


@njit(cache=True)
def rebuild_table(nodes, table, header):
    """Insert every live node into an empty table."""
    for node in range(1, header[TOP_NODE]):
        if nodes[node].depth != FREED:
            enter(nodes, table, node)


@njit
def _advance(nodes, table, text, loci, slots, header, slot, token):
    here = write_token(text, slots, header, slot, token)
    mask = header[RING] - 1
    length = slots[slot].length
    weight = slots[slot].weight
    oldest = slots[slot].oldest
    last = length
    if token == TERMINATOR:
        last = length - 1
    else:
        loci[slot, BEGINS, length & mask] = here
    met = False  # whether a longer window found its token there, inserted by another window
    for window in range(oldest, last + 1):
        place = window & mask
        size = length - window
        begins = loci[slot, BEGINS, place]
        node = ROOT
        if size > 0:
            node = loci[slot, AT_NODE, place]
            if node < 0:
                continue
            if loci[slot, ENDS, place] > length:
                if met:
                    continue
                at = nodes[node].at
                known = text[at + size]
                if known == token:
                    met = at != begins
                    continue
                if known == UNWRITTEN:
                    nodes[node].at = begins
                    continue
                node = split(nodes, table, text, loci, slots, header, node, size)
            nodes[node].at = begins
        child = find_child(nodes, table, node, token)
        if child == ROOT:
            child = add_leaf(nodes, table, header, node, token, begins, weight)
            nodes[child].total = -float(1 + slot * header[RING] + place)
            loci[slot, AT_NODE, place] = ~child
        else:
            met = True
            share(nodes, loci, header, child)
            loci[slot, AT_NODE, place] = child
            nodes[child].count += weight
            if node != ROOT:
                nodes[node].total += weight
                gained(nodes, node, child)
        loci[slot, ENDS, place] = window + nodes[child].depth
    slots[slot].length = length + 1
    if length + 1 - oldest == header[MAX_DEPTH]:
        retire(nodes, loci, header, slot, oldest)
        slots[slot].oldest = oldest + 1


@njit(cache=True)
def append(nodes, table, text, loci, slots, header, slot, tokens, begin):
    """Append ``tokens[begin:]`` to a growing sequence; returns how many are appended when the arrays are full.

    Returns -1 and appends nothing if a token is out of range.
    """
    for i in range(begin, len(tokens)):
        if tokens[i] < 0 or tokens[i] == TERMINATOR:
            return -1
    spare_blocks = len(text) // header[STRIDE]
    for i in range(begin, len(tokens)):
        if header[LIVE_NODES] + 2 * header[MAX_DEPTH] > len(nodes) or header[LIVE_BLOCKS] >= spare_blocks:
            return i
        _advance(nodes, table, text, loci, slots, header, slot, tokens[i])
    return len(tokens)


@njit(cache=True)
def finish(nodes, table, text, loci, slots, header, slot):
    """End a sequence; returns False if room for this must be made first."""
    if header[LIVE_NODES] + 2 * header[MAX_DEPTH] > len(nodes):
        return False
    if slots[slot].length > 0:
        _advance(nodes, table, text, loci, slots, header, slot, TERMINATOR)
        slots[slot].length -= 1
        for window in range(slots[slot].oldest, slots[slot].length):
            retire(nodes, loci, header, slot, window)
    slots[slot].active = 0
    return True


@njit
def _remove_window(nodes, table, text, loci, slots, header, begins, size, weight):
    node = ROOT
    depth = 0
    while depth < size:
        child = find_child(nodes, table, node, text[begins + depth])
        nodes[child].count -= weight
        if node != ROOT:
            nodes[node].total -= weight
            if nodes[node].best == child:
                nodes[node].best = STALE
        if nodes[child].count == 0.0:
            remove_leaf(nodes, table, loci, slots, header, child)
            return
        depth = nodes[child].depth
        node = child


@njit(cache=True)
def remove(nodes, table, text, loci, slots, header, block, length, ended, weight):
    """Remove a sequence's windows from the counts and mark its blocks; ``sweep`` must follow."""
    starts, stride, max_depth = header[STARTS], header[STRIDE], header[MAX_DEPTH]
    written = length + ended
    at = block
    for window in range(length):
        begins = at * stride + BLOCK_HEADER + window % starts
        size = min(max_depth, written - window)
        _remove_window(nodes, table, text, loci, slots, header, begins, size, weight)
        if window % starts == starts - 1 or window == length - 1:
            text[at * stride + 1] = REMOVED
            at = text[at * stride]


@njit(cache=True)
def sweep(nodes, text, loci, slots, header):
    """Free the blocks of removed sequences to which no node's ``at`` points; a later sweep frees the others.

    A node whose weight comes only from growing windows may hold no more tokens than they have.
    """
    stride = header[STRIDE]
    mask = header[RING] - 1
    for node in range(1, header[TOP_NODE]):
        if nodes[node].depth == FREED or text[nodes[node].at // stride * stride + 1] == IN_USE:
            continue
        if nodes[node].first != NONE:
            at = nodes[nodes[node].first].at
            if text[at // stride * stride + 1] == IN_USE:
                nodes[node].at = at
                continue
        upper = nodes[nodes[node].parent].depth
        weight, deepest, begins = 0.0, 0, 0
        for slot in range(len(slots)):
            if slots[slot].active == 0:
                continue
            length = slots[slot].length
            for size in range(upper + 1, min(nodes[node].depth, length - slots[slot].oldest) + 1):
                place = (length - size) & mask
                if loci[slot, AT_NODE, place] == node:
                    weight += slots[slot].weight
                    if size > deepest:
                        deepest, begins = size, loci[slot, BEGINS, place]
        if deepest > 0 and (weight == nodes[node].count or deepest == nodes[node].depth):
            nodes[node].at = begins
        else:
            text[nodes[node].at // stride * stride + 1] = REFERENCED
    for block in range(header[TOP_BLOCK]):
        state = text[block * stride + 1]
        if state == REMOVED:
            text[block * stride] = header[FREE_BLOCK]
            text[block * stride + 1] = IN_USE  # no node points to it
            header[FREE_BLOCK] = block
            header[LIVE_BLOCKS] -= 1
        elif state == REFERENCED:
            text[block * stride + 1] = REMOVED


@njit(cache=True)
def propose(nodes, text, loci, slots, header, slot, max_tokens, factor, offset, min_probability, best, draft):
    """Apply DAS's speculation to every match of the sequence's end; returns (tokens, score, match length).

    ``best`` receives the tokens; ``draft`` is scratch memory of the same size.
    """
    mask = header[RING] - 1
    max_depth = header[MAX_DEPTH]
    length = slots[slot].length
    found, score, matched = 0, 0.0, 0
    for window in range(slots[slot].oldest, length):
        size = length - window
        limit = min(max_tokens, max_depth - size, int(factor * size + offset))
        if score >= limit:  # no probability is above 1
            continue
        node = loci[slot, AT_NODE, window & mask]
        if node < 0:  # the string has not occurred before
            continue
        end = nodes[node].depth
        at = nodes[node].at
        probability, total, count = 1.0, 0.0, 0
        while count < limit:
            if size < end:
                token = text[at + size]
                if token == UNWRITTEN or token == TERMINATOR:
                    break
            else:
                child = best_child(nodes, node)
                if child == NONE:
                    break
                token = nodes[child].token
                probability *= nodes[child].count / nodes[node].total
                if token == TERMINATOR or probability < min_probability:
                    break
                node = child
                end = nodes[node].depth
                at = nodes[node].at
            draft[count] = token
            total += probability
            count += 1
            size += 1
        if total > score:
            found, score, matched = count, total, length - window
            best[:count] = draft[:count]
    return found, score, matched


@njit(cache=True)
def locate(nodes, table, text, header, tokens):
    """The node on whose edge a path of 1 to ``max_depth`` tokens ends; ROOT if it does not occur."""
    node = ROOT
    depth = 0
    while depth < len(tokens):
        node = find_child(nodes, table, node, tokens[depth])
        if node == ROOT:
            return ROOT
        for i in range(depth, min(nodes[node].depth, len(tokens))):
            if text[nodes[node].at + i] != tokens[i]:
                return ROOT
        depth = nodes[node].depth
    return node


@njit(cache=True)
def scale(nodes, slots, header, factor):
    """Multiply every weight by ``factor``."""
    for node in range(header[TOP_NODE]):
        nodes[node].count *= factor
        if nodes[node].total > 0.0:
            nodes[node].total *= factor
    for slot in range(len(slots)):
        slots[slot].weight *= factor

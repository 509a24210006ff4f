"""The suffix tree's nodes and text as flat arrays, and the basic operations of ``suffix_kernels``.

A node represents the edge that leads to it. ``count`` is the weight of the windows that contain the edge's first token,
``total`` the sum over its children. ``depth`` is the path's length in tokens at the edge's end (``max_depth`` at a
leaf). ``at`` is the start of an occurrence of the whole path in the text, so that the edge's tokens are
``text[at + depth(parent) : at + depth]``. An open hash table ``(parent, first token) -> node`` finds children.

numba's cache checks only a kernel's own file: after a change here, ``suffix_kernels.py`` must be changed too.
"""

from __future__ import annotations

import numpy as np
from numba import njit

NODE = np.dtype(
    [
        ("count", "f8"),
        ("total", "f8"),
        ("parent", "i4"),
        ("token", "i4"),
        ("at", "i4"),
        ("depth", "i4"),
        ("best", "i4"),
        ("first", "i4"),
        ("next", "i4"),
        ("prev", "i4"),
    ]
)
SLOT = np.dtype(
    [
        ("weight", "f8"),
        ("length", "i4"),
        ("oldest", "i4"),  # first window that still grows
        ("first", "i4"),  # blocks: the sequence's first, its last, the one before that
        ("block", "i4"),
        ("before", "i4"),
        ("active", "i4"),
    ]
)
ROOT = 0
NONE = -1
STALE = -2  # of ``best``: must be recomputed from the children
FREED = -1  # of ``depth``
UNWRITTEN = -1
TERMINATOR = 2**31 - 1  # follows a finished sequence; larger than every token, so that a draft wins ties

# entries of ``header``
MAX_DEPTH, RING, STARTS, STRIDE, FREE_NODE, TOP_NODE, LIVE_NODES, FREE_BLOCK, TOP_BLOCK, LIVE_BLOCKS = range(10)
HEADER = 10
# A block of text: two entries (the sequence's next block, its state), tokens, and a copy of the next block's first
# ``max_depth`` tokens, so that every window is contiguous and a sequence grows without moving.
BLOCK_HEADER = 2
IN_USE, REMOVED, REFERENCED = 0, 1, 2
# rows of ``loci``: node, start of the window in the text, length of the sequence at which the edge ends
AT_NODE, BEGINS, ENDS = range(3)


@njit
def _home(table, parent, token):
    mixed = (np.uint64(parent) * np.uint64(0x9E3779B97F4A7C15)) ^ (np.uint64(token) * np.uint64(0xC2B2AE3D27D4EB4F))
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    return np.int64((mixed >> np.uint64(32)) & np.uint64(len(table) - 1))


@njit
def find_child(nodes, table, parent, token):
    """The child of ``parent`` whose edge begins with ``token``; ROOT if there is none."""
    place = _home(table, parent, token)
    while True:
        node = table[place]
        if node == ROOT or (nodes[node].parent == parent and nodes[node].token == token):
            return node
        place = (place + 1) & (len(table) - 1)


@njit
def enter(nodes, table, node):
    place = _home(table, nodes[node].parent, nodes[node].token)
    while table[place] != ROOT:
        place = (place + 1) & (len(table) - 1)
    table[place] = node


@njit
def _place_of(nodes, table, node):
    place = _home(table, nodes[node].parent, nodes[node].token)
    while table[place] != node:
        place = (place + 1) & (len(table) - 1)
    return place


@njit
def leave(nodes, table, node):
    """Delete a node, moving later entries of the run up, so that no tombstones accumulate."""
    mask = len(table) - 1
    hole = _place_of(nodes, table, node)
    place = hole
    while True:
        place = (place + 1) & mask
        other = table[place]
        if other == ROOT:
            break
        home = _home(table, nodes[other].parent, nodes[other].token)
        if ((place - home) & mask) >= ((place - hole) & mask):
            table[hole] = other
            hole = place
    table[hole] = ROOT


@njit
def _allocate(nodes, header):
    node = header[FREE_NODE]
    if node != ROOT:
        header[FREE_NODE] = nodes[node].next
    else:
        node = header[TOP_NODE]
        header[TOP_NODE] += 1
    header[LIVE_NODES] += 1
    return node


@njit
def _free(nodes, header, node):
    nodes[node].depth = FREED
    nodes[node].next = header[FREE_NODE]
    header[FREE_NODE] = node
    header[LIVE_NODES] -= 1


@njit
def gained(nodes, parent, child):
    """Update ``parent`` after the weight of its child ``child`` has grown."""
    best = nodes[parent].best
    if best == STALE or best == child:
        return
    if best == NONE or nodes[child].count > nodes[best].count:
        nodes[parent].best = child
    elif nodes[child].count == nodes[best].count and nodes[child].token < nodes[best].token:
        nodes[parent].best = child


@njit
def best_child(nodes, parent):
    best = nodes[parent].best
    if best == STALE:
        nodes[parent].best = NONE
        child = nodes[parent].first
        while child != NONE:
            gained(nodes, parent, child)
            child = nodes[child].next
        best = nodes[parent].best
    return best


@njit
def add_leaf(nodes, table, header, parent, token, at, weight):
    leaf = _allocate(nodes, header)
    node = nodes[leaf]
    node.count = weight
    node.total = 0.0
    node.parent = parent
    node.token = token
    node.at = at
    node.depth = header[MAX_DEPTH]
    node.best = NONE
    node.first = NONE
    node.next = NONE
    node.prev = NONE
    if parent != ROOT:  # the root's children, as many as the vocabulary has tokens, are never enumerated
        first = nodes[parent].first
        node.next = first
        if first != NONE:
            nodes[first].prev = leaf
        nodes[parent].first = leaf
        nodes[parent].total += weight
        gained(nodes, parent, leaf)
    enter(nodes, table, leaf)
    return leaf


@njit
def _take_place(nodes, table, old, new):
    """Replace ``old`` by ``new``: same parent, same first token, same neighbours."""
    table[_place_of(nodes, table, old)] = new
    parent = nodes[old].parent
    nodes[new].parent = parent
    nodes[new].token = nodes[old].token
    nodes[new].next = nodes[old].next
    nodes[new].prev = nodes[old].prev
    if nodes[old].next != NONE:
        nodes[nodes[old].next].prev = new
    if nodes[old].prev != NONE:
        nodes[nodes[old].prev].next = new
    elif parent != ROOT:
        nodes[parent].first = new
    if nodes[parent].best == old:
        nodes[parent].best = new


@njit(cache=True)
def growing_weight(loci, slots, header, node, shortest, longest, instead):
    """Weight of the growing sequences' windows of ``shortest`` to ``longest`` tokens that end on ``node``'s edge.

    With ``instead`` other than NONE these windows move to that node, whose depth is ``longest``.
    """
    weight = 0.0
    mask = header[RING] - 1
    for slot in range(len(slots)):
        if slots[slot].active == 0:
            continue
        length = slots[slot].length
        for size in range(shortest, min(longest, length - slots[slot].oldest) + 1):
            place = (length - size) & mask
            if loci[slot, AT_NODE, place] == node:
                weight += slots[slot].weight
                if instead != NONE:
                    loci[slot, AT_NODE, place] = instead
                    loci[slot, ENDS, place] = length - size + longest
    return weight


@njit
def share(nodes, loci, header, leaf):
    """Prepare a leaf for a second window."""
    if nodes[leaf].total < 0.0:
        owner = int(-nodes[leaf].total) - 1
        loci[owner // header[RING], AT_NODE, owner % header[RING]] = leaf
        nodes[leaf].total = 0.0


@njit
def retire(nodes, loci, header, slot, window):
    """End a window's growth; its text contains its whole edge."""
    place = window & (header[RING] - 1)
    node = loci[slot, AT_NODE, place]
    if node < 0:
        node = ~node
        nodes[node].total = 0.0
    nodes[node].at = loci[slot, BEGINS, place]


@njit
def split(nodes, table, text, loci, slots, header, node, depth):
    """Split the edge to ``node`` after ``depth`` tokens of its path; returns the new inner node."""
    between = _allocate(nodes, header)
    upper = nodes[nodes[node].parent].depth
    nodes[between].count = nodes[node].count
    nodes[between].at = nodes[node].at
    nodes[between].depth = depth
    nodes[between].first = node
    nodes[between].best = node
    _take_place(nodes, table, node, between)
    nodes[node].count -= growing_weight(loci, slots, header, node, upper + 1, depth, between)
    nodes[node].parent = between
    nodes[node].token = text[nodes[node].at + depth]
    nodes[node].next = NONE
    nodes[node].prev = NONE
    nodes[between].total = nodes[node].count
    enter(nodes, table, node)
    return between


@njit
def remove_leaf(nodes, table, loci, slots, header, leaf):
    leave(nodes, table, leaf)
    parent = nodes[leaf].parent
    if parent != ROOT:
        if nodes[leaf].next != NONE:
            nodes[nodes[leaf].next].prev = nodes[leaf].prev
        if nodes[leaf].prev != NONE:
            nodes[nodes[leaf].prev].next = nodes[leaf].next
        else:
            nodes[parent].first = nodes[leaf].next
        child = nodes[parent].first
        if nodes[child].next == NONE:  # merge the edge of the only remaining child with the parent's
            upper = nodes[nodes[parent].parent].depth
            depth = nodes[child].depth
            share(nodes, loci, header, child)
            leave(nodes, table, child)
            nodes[child].count = nodes[parent].count
            _take_place(nodes, table, parent, child)
            mask = header[RING] - 1
            for slot in range(len(slots)):
                if slots[slot].active == 0:
                    continue
                length = slots[slot].length
                for size in range(upper + 1, min(nodes[parent].depth, length - slots[slot].oldest) + 1):
                    place = (length - size) & mask
                    if loci[slot, AT_NODE, place] == parent:
                        loci[slot, AT_NODE, place] = child
                        loci[slot, ENDS, place] = length - size + depth
            _free(nodes, header, parent)
    _free(nodes, header, leaf)


@njit
def take_block(text, header):
    """Take a block with unwritten tokens; the caller has checked that there is one."""
    block = header[FREE_BLOCK]
    stride = header[STRIDE]
    if block != NONE:
        header[FREE_BLOCK] = text[block * stride]
    else:
        block = header[TOP_BLOCK]
        header[TOP_BLOCK] += 1
    header[LIVE_BLOCKS] += 1
    text[block * stride] = NONE
    text[block * stride + 1] = IN_USE
    text[block * stride + BLOCK_HEADER : (block + 1) * stride] = UNWRITTEN
    return block


@njit
def write_token(text, slots, header, slot, token):
    """Append a token to the sequence's text; returns its position."""
    starts, stride = header[STARTS], header[STRIDE]
    offset = slots[slot].length % starts
    if offset == 0 and token != TERMINATOR:
        before = slots[slot].block
        slots[slot].before = before
        slots[slot].block = take_block(text, header)
        if before != NONE:
            text[before * stride] = slots[slot].block
        else:
            slots[slot].first = slots[slot].block
    before = slots[slot].block if offset == 0 and token == TERMINATOR else slots[slot].before
    if before != NONE and offset < header[MAX_DEPTH]:
        text[before * stride + BLOCK_HEADER + starts + offset] = token
    at = slots[slot].block * stride + BLOCK_HEADER + offset
    if offset or token != TERMINATOR:
        text[at] = token
    return at

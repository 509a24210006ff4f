"""Batching of sequences: micro-batches with a token limit, and items over data-parallel ranks; pure."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from megatron_tlt.errors import ConfigError


def _check_longest(lengths: Sequence[int], max_tokens: int) -> None:
    longest = max(lengths, default=0)
    if longest > max_tokens:
        raise ConfigError(
            f"a sequence has {longest} tokens, which does not fit max_tokens_per_micro_batch {max_tokens}"
        )


def plan_micro_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Groups sequences so that each group, padded to its longest, has at most ``max_tokens`` tokens.

    ``lengths`` are in tokens. Sequences are taken in descending order (ties by index), so a group has similar lengths.

    Returns lists of indices into ``lengths``; each occurs once. Raises ConfigError for a sequence above ``max_tokens``.
    """
    _check_longest(lengths, max_tokens)
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    batches: list[list[int]] = []
    for i in order:
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= max_tokens:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def sequence_cost(length: int, attention_share: float) -> float:
    """The work of a sequence relative to a token's work outside attention: ``length + attention_share * length ** 2``.

    ``attention_share`` is causal attention's operations per pair of tokens over the other operations per token:
    attention's width over the parameters that process a token (Megatron-LM, 2104.04473, section 3, per layer).
    """
    return length + attention_share * length * length


def plan_packs(lengths: Sequence[int], costs: Sequence[float], max_tokens: int) -> list[list[int]]:
    """Groups sequences into few packs of at most ``max_tokens`` tokens and nearly equal cost.

    Starts with the minimum number of packs. The costliest remaining sequence goes to the cheapest pack with room for
    it; if no pack has room, it opens another.

    Returns lists of indices into ``lengths``, each ascending; each index occurs once, and no pack is empty. Raises
    ConfigError if a sequence is longer than ``max_tokens``.
    """
    _check_longest(lengths, max_tokens)
    count = -(-sum(lengths) // max_tokens)
    packs: list[list[int]] = [[] for _ in range(count)]
    tokens, work = [0] * count, [0.0] * count
    for i in sorted(range(len(lengths)), key=lambda i: (-costs[i], i)):
        room = [k for k in range(len(packs)) if tokens[k] + lengths[i] <= max_tokens]
        if room:
            at = min(room, key=lambda k: (work[k], k))
        else:
            at = len(packs)
            packs.append([])
            tokens.append(0)
            work.append(0.0)
        packs[at].append(i)
        tokens[at] += lengths[i]
        work[at] += costs[i]
    return [sorted(pack) for pack in packs if pack]


def split_to_count(groups: Sequence[Sequence[int]], costs: Sequence[float], count: int) -> list[list[int]]:
    """Halves the costliest groups until there are ``count``; once all hold one item, empty groups are added.

    An interleaved pipeline takes micro-batches in multiples of its stages; ranks that share experts need equal numbers.
    ``costs`` has one entry per item.
    """
    result = [list(group) for group in groups]
    while len(result) < count:
        at = max(
            range(len(result)), key=lambda k: (len(result[k]) > 1, sum(costs[i] for i in result[k]), -k), default=-1
        )
        if at < 0 or len(result[at]) < 2:
            result.append([])
        else:
            result[at : at + 1] = [result[at][::2], result[at][1::2]]
    return result


def balance(costs: Sequence[float], ranks: int, speeds: Sequence[float] | None = None) -> list[list[int]]:
    """Splits items over ``ranks`` with nearly equal time: the costliest remaining goes to the rank that ends first.

    A rank's time is its cost over its speed; without ``speeds`` all are equal. The longest time exceeds any other
    rank's by at most that rank's time for the costliest item. Returns ``ranks`` lists of indices into ``costs``, each
    ascending; with equal speeds a rank is empty only if there are fewer items than ranks.
    """
    if ranks < 1:
        raise ValueError(f"ranks is {ranks}; must be at least 1")
    speeds = [1.0] * ranks if speeds is None else speeds
    if len(speeds) != ranks:
        raise ValueError(f"{len(speeds)} speeds of {ranks} ranks; must be one for each")
    # Of equally fast ranks the least loaded ends first: by cost, then by number of items, so that with costs of 0 the
    # items are still distributed.
    heaps = {speed: [(0.0, 0, at) for at in range(ranks) if speeds[at] == speed] for speed in dict.fromkeys(speeds)}
    parts: list[list[int]] = [[] for _ in range(ranks)]

    def end(speed: float, cost: float) -> tuple[float, float, int]:
        work, items, rank = heaps[speed][0]
        return (work + cost) / speed, (items + 1) / speed, rank

    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        speed = min(heaps, key=lambda one: end(one, costs[i])) if len(heaps) > 1 else speeds[0]
        work, items, rank = heaps[speed][0]
        parts[rank].append(i)
        heapq.heapreplace(heaps[speed], (work + costs[i], items + 1, rank))
    return [sorted(part) for part in parts]

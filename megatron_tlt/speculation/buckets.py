"""Strategies allowed per batch size: the bucket mapping of BEG-MAB, and the token budget."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from megatron_tlt.speculation.strategy import MODEL_FREE, OFF, Strategy


@dataclass(frozen=True)
class TunerBucket:
    """The ``arms`` of all batches up to ``upper`` requests that are in no smaller bucket."""

    upper: int
    arms: tuple[Strategy, ...]


def group_by_verify_tokens(strategies: Iterable[Strategy]) -> list[tuple[Strategy, ...]]:
    """Speculating strategies grouped by their tokens to verify, most tokens first."""
    speculating = sorted(set(strategies) - {OFF})
    counts = sorted({strategy.verify_tokens for strategy in speculating}, reverse=True)
    return [tuple(s for s in speculating if s.verify_tokens == count) for count in counts]


def default_bounds(count: int, max_batch: int) -> tuple[int, ...]:
    """``count`` upper bounds (fewer for small ``max_batch``) that grow like a power and end at ``max_batch``."""
    bounds = {max(1, round(max_batch ** ((i + 1) / count))) for i in range(count)}
    return tuple(sorted(bounds))


def map_buckets(
    strategies: Sequence[Strategy],
    max_batch: int,
    bounds: Sequence[int] | None = None,
    neighbours: int | None = 0,
    always: bool = True,
) -> tuple[TunerBucket, ...]:
    """Map groups of equal tokens to verify to buckets of batch sizes, most tokens to smallest batches (TLT, BEG-MAB).

    Args:
        max_batch: the largest batch, which the last bucket must include.
        bounds: upper bounds of the buckets, ascending; by default one bucket per group, growing like a power.
        neighbours: number of neighbouring groups on either side that a bucket includes; None: all of them.
        always: every bucket also has "off" and, if ``strategies`` has any, the model-free strategy whose tokens to
            verify are nearest to the bucket's own group.

    Raises:
        ValueError: there are no strategies, or bounds are not ascending and positive, or end below ``max_batch``.
    """
    if not strategies:
        raise ValueError("there are no strategies; at least one is needed")
    groups = group_by_verify_tokens(strategies) or [()]
    if bounds is None:
        bounds = default_bounds(len(groups), max_batch)
    if not bounds or bounds[0] < 1 or any(a >= b for a, b in pairwise(bounds)):
        raise ValueError(f"bounds of the buckets are {list(bounds)}; they must be positive and ascending")
    if bounds[-1] < max_batch:
        raise ValueError(
            f"bounds of the buckets are {list(bounds)}; the last must be {max_batch} or more, the largest batch that "
            "speculates (threshold + hysteresis of the gate)"
        )
    count = len(groups)
    reach = count if neighbours is None else neighbours
    buckets = []
    for i, upper in enumerate(bounds):
        # if buckets and groups differ in number, the more numerous are spread evenly over the others
        own = [j for j in range(count) if j * len(bounds) // count == i] or [i * count // len(bounds)]
        near = range(max(0, own[0] - reach), min(count, own[-1] + reach + 1))
        arms = {strategy for j in near for strategy in groups[j]}
        if always:
            arms |= _always(strategies, groups[own[0]])
        elif not arms:
            arms = {OFF}
        buckets.append(TunerBucket(upper, tuple(sorted(arms))))
    return tuple(buckets)


def _always(strategies: Sequence[Strategy], group: tuple[Strategy, ...]) -> set[Strategy]:
    wanted = group[0].verify_tokens if group else 1
    free = [strategy for strategy in strategies if strategy.drafter in MODEL_FREE]
    nearest = sorted(free, key=lambda s: (abs(s.verify_tokens - wanted), s))[:1]
    return {OFF, *nearest}


def bucket_of(buckets: Sequence[TunerBucket], batch: int) -> int | None:
    """The index of a batch's bucket; None if the batch is larger than any bucket."""
    return next((i for i, bucket in enumerate(buckets) if batch <= bucket.upper), None)


def within_budget(
    arms: Iterable[Strategy], batch: int, token_budget: int | None, withheld: Collection[str] = ()
) -> list[Strategy]:
    """The arms whose tokens to verify, over the whole batch, are at most ``token_budget`` (None: no bound).

    Arms of ``withheld`` drafters are omitted.

    Larger steps could run out of memory (TLT). "off" always fits, because it is plain decoding; it remains if nothing
    else fits.
    """
    allowed = [arm for arm in arms if not arm.uses(withheld)]
    if token_budget is not None:
        allowed = [arm for arm in allowed if arm == OFF or batch * arm.verify_tokens <= token_budget]
    return allowed or [OFF]

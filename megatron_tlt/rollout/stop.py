"""Decision to stop decoding early, taken by all ranks of an engine at the same step."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

ASK_EVERY_S = 0.5
_MOST_STEPS = 1024


class StopAgreement:
    """Called after each engine step on every rank of the engine; returns True on all of them at the same step.

    Ranks of one engine join collectives in every step, so a rank that left alone would block the others. They reduce
    two numbers about every ``ASK_EVERY_S`` seconds. The reduction must follow the same step on all ranks, so the number
    of steps until the next one is computed from the longest time that any rank measured.

    Args:
        should_stop: whether this rank was asked to stop.
        group: CPU group of the engine's ranks; None for an engine of one rank, which checks at every step.
    """

    def __init__(self, should_stop: Callable[[], bool], group: dist.ProcessGroup | None) -> None:
        self._should_stop = should_stop
        self._group = group
        self._steps = self._left = 1
        self._asked = time.perf_counter()

    def __call__(self) -> bool:
        if self._group is None:
            return self._should_stop()
        self._left -= 1
        if self._left:
            return False
        microseconds = int((time.perf_counter() - self._asked) * 1e6)
        numbers = torch.tensor([int(self._should_stop()), max(1, microseconds)], dtype=torch.int64)
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self._group)
        stop, longest = numbers.tolist()
        self._asked = time.perf_counter()
        self._steps = self._left = min(_MOST_STEPS, max(1, round(self._steps * ASK_EVERY_S * 1e6 / longest)))
        return bool(stop)

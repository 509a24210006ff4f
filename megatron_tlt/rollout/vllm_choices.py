"""Broadcast of the strategy choice to all ranks of an engine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from megatron_tlt.speculation.strategy import Strategy, drafters

Choice = tuple[Strategy, Mapping[str, int] | None]
_UNLIMITED = -1


class RunningRequests(Mapping[str, int]):
    """Generated tokens by caller's id of each running request, computed at first use.

    A choice by batch size alone, made in every engine step, needs only the length.
    """

    def __init__(self, running: Sequence[Any], external_id: Callable[[str], str]) -> None:
        self._running = running
        self._external_id = external_id

    @cached_property
    def _tokens(self) -> dict[str, int]:
        return {self._external_id(request.request_id): int(request.num_output_tokens) for request in self._running}

    def __getitem__(self, name: str) -> int:
        return self._tokens[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tokens)

    def __len__(self) -> int:
        return len(self._running)


def broadcast_strategy(choice: Choice | None, requests: Collection[str], group: dist.ProcessGroup | None) -> Choice:
    """Broadcast the first rank's ``choice`` over ``group``; other ranks pass None. Collective, over CPU tensors.

    Args:
        choice: a chooser's result; budgets of ids that are not in ``requests`` are dropped.
        requests: the running requests, in the same order on every rank.
        group: None for a single rank, which keeps its choice.
    """
    if group is None:
        assert choice is not None
        return choice
    source = dist.get_global_rank(group, 0)
    head = torch.zeros(5, dtype=torch.int64)
    if choice is not None:
        strategy, budgets = choice
        drafter = drafters().index(strategy.drafter)
        head = torch.tensor(
            [drafter, strategy.num_tokens, strategy.by_length, strategy.least_percent, budgets is not None]
        )
    dist.broadcast(head, source, group)
    drafter, num_tokens, by_length, least_percent, limited = head.tolist()
    strategy = Strategy(drafters()[drafter], num_tokens, bool(by_length), least_percent)
    if not limited:
        return strategy, None
    mine = (choice[1] if choice is not None else None) or {}
    row = torch.tensor([mine.get(name, _UNLIMITED) for name in requests], dtype=torch.int64)
    dist.broadcast(row, source, group)
    return strategy, {name: value for name, value in zip(requests, row.tolist(), strict=True) if value != _UNLIMITED}

"""What a rank's gradient consists of, while its samples come one part after another, or by logical shards."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_tlt.errors import RunError
from megatron_tlt.platform.collectives import all_gather_data

RESERVED_METRICS = ("tokens", "grad_norm", "lr", "router_agreement")
"""Metric names that an update reports itself; a loss must not use them."""


class GradientPart:
    """The sizes of the samples whose gradient a rank has summed, and the sums of the loss's metrics over them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.sizes = torch.zeros(2, dtype=torch.float64, device=device)
        """Tokens in the layers, padding included, and the denominator of the loss."""
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        """Sum of the loss over micro-batches, before it is divided by the denominator."""
        self.sums: dict[str, torch.Tensor] = {"tokens": torch.zeros((), dtype=torch.float64, device=device)}
        """Response tokens, and sums of the loss's metrics over them."""

    def add(self, sizes: torch.Tensor) -> None:
        """Adds the sizes of further samples."""
        self.sizes = self.sizes + sizes

    def add_metrics(self, tokens: torch.Tensor, metrics: Mapping[str, Any]) -> None:
        """Adds a micro-batch's response tokens and the metrics that the loss returned for it.

        Raises:
            RunError: a metric is not one number, or has the name of one that an update reports itself.
        """
        self.sums["tokens"] += tokens.double()
        for name, value in metrics.items():
            found = torch.as_tensor(value).detach()
            if found.numel() != 1 or name in RESERVED_METRICS:
                raise RunError(
                    f"metric {name!r} of the loss: found shape {tuple(found.shape)}; allowed: one number, a sum over "
                    f"response tokens, under another name than {', '.join(RESERVED_METRICS)}"
                )
            found = found.reshape(()).to(self._device, torch.float64)
            self.sums[name] = self.sums.get(name, 0.0) + found

    def loss_of_all_ranks(self, denominator: torch.Tensor, *, counts: bool) -> torch.Tensor:
        """The loss of the batch, a float32 number; a collective over the world. ``counts``: as below."""
        total = self.loss if counts else torch.zeros_like(self.loss)
        dist.all_reduce(total)
        return (total / denominator.clamp(min=1)).float()

    def means_of_all_ranks(self, *, counts: bool) -> dict[str, float]:
        """The means over response tokens of each metric, and the number of ``tokens``; a collective over the world.

        ``counts``: whether this rank's sums count; of ranks that compute the same losses one does.
        """
        sums = self.sums if counts else {}
        names = _names_of_all_ranks([sums])
        values = self._values(sums, names)
        dist.all_reduce(values)
        return _means(names, values.tolist())

    def _values(self, sums: Mapping[str, torch.Tensor], names: Sequence[str]) -> torch.Tensor:
        absent = torch.zeros((), dtype=torch.float64, device=self._device)
        return torch.stack([sums.get(name, absent) for name in names])


class ShardParts:
    """The parts of this rank's logical shards; what it sums over all shards does not depend on who has them.

    Args:
        count: logical shards of the batch.
        own: this data-parallel rank's.
        group: the data-parallel ranks.
    """

    def __init__(self, count: int, own: range, group: dist.ProcessGroup, device: torch.device) -> None:
        self._count, self._own, self._group, self._device = count, own, group, device
        self.parts = [GradientPart(device) for _ in own]

    def sizes_of_all_ranks(self) -> torch.Tensor:
        """``GradientPart.sizes`` of the batch; a collective over the data-parallel ranks."""
        return self._sum([part.sizes for part in self.parts], self._group)

    def loss_of_all_ranks(self, denominator: torch.Tensor, *, counts: bool) -> torch.Tensor:
        """As that of ``GradientPart``."""
        total = self._sum([part.loss * counts for part in self.parts])
        return (total / denominator.clamp(min=1)).float()

    def means_of_all_ranks(self, *, counts: bool) -> dict[str, float]:
        """As that of ``GradientPart``."""
        sums = [part.sums if counts else {} for part in self.parts]
        names = _names_of_all_ranks(sums)
        rows = [part._values(own, names) for part, own in zip(self.parts, sums, strict=True)]
        return _means(names, self._sum(rows).tolist())

    def _sum(self, rows: Sequence[torch.Tensor], group: dist.ProcessGroup | None = None) -> torch.Tensor:
        """The sum over all shards in their order, of a row (K) or number for each of this rank's."""
        table = torch.zeros((self._count, *rows[0].shape), dtype=torch.float64, device=self._device)
        table[self._own.start : self._own.stop] = torch.stack(list(rows))
        dist.all_reduce(table, group=group)  # at each entry only one rank's is nonzero
        return functools.reduce(operator.add, table.unbind())


def _names_of_all_ranks(sums: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of all metrics: not every rank computes the loss."""
    own = list(dict.fromkeys(name for one in sums for name in one))
    return list(dict.fromkeys(name for found in all_gather_data(own, list[str]) for name in found))


def _means(names: Sequence[str], values: Sequence[float]) -> dict[str, float]:
    totals = dict(zip(names, values, strict=True))
    tokens = totals.pop("tokens")
    return {name: value / max(tokens, 1.0) for name, value in totals.items()} | {"tokens": tokens}

"""What a rank's gradient consists of, while its samples come one part after another."""

from __future__ import annotations

from collections.abc import Mapping
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
        self._sums = {"tokens": torch.zeros((), dtype=torch.float64, device=device)}

    def add(self, sizes: torch.Tensor) -> None:
        """Adds the sizes of further samples."""
        self.sizes = self.sizes + sizes

    def add_metrics(self, tokens: torch.Tensor, metrics: Mapping[str, Any]) -> None:
        """Adds a micro-batch's response tokens and the metrics that the loss returned for it.

        Raises:
            RunError: a metric is not one number, or has the name of one that an update reports itself.
        """
        self._sums["tokens"] += tokens.double()
        for name, value in metrics.items():
            found = torch.as_tensor(value).detach()
            if found.numel() != 1 or name in RESERVED_METRICS:
                raise RunError(
                    f"metric {name!r} of the loss: found shape {tuple(found.shape)}; allowed: one number, a sum over "
                    f"response tokens, under another name than {', '.join(RESERVED_METRICS)}"
                )
            found = found.reshape(()).to(self._device, torch.float64)
            self._sums[name] = self._sums.get(name, 0.0) + found

    def loss_of_all_ranks(self, denominator: torch.Tensor, *, counts: bool) -> torch.Tensor:
        """The loss of the batch, a float32 number; a collective over the world. ``counts``: as below."""
        total = self.loss if counts else torch.zeros_like(self.loss)
        dist.all_reduce(total)
        return (total / denominator.clamp(min=1)).float()

    def means_of_all_ranks(self, *, counts: bool) -> dict[str, float]:
        """The means over response tokens of each metric, and the number of ``tokens``; a collective over the world.

        ``counts``: whether this rank's sums count; of ranks that compute the same losses one does.
        """
        sums = self._sums if counts else {}
        # not every rank computes the loss
        names = list(dict.fromkeys(name for found in all_gather_data(list(sums), list[str]) for name in found))
        absent = torch.zeros((), dtype=torch.float64, device=self._device)
        values = torch.stack([sums.get(name, absent) for name in names])
        dist.all_reduce(values)
        totals = dict(zip(names, values.tolist(), strict=True))
        tokens = totals.pop("tokens")
        return {name: value / max(tokens, 1.0) for name, value in totals.items()} | {"tokens": tokens}

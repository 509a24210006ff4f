"""A small learned optimizer of whole tensors, for benchmarks and tests where no package with one is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

_DECAYS = (0.9, 0.99, 0.999)
_FEATURES = 3 + 2 * len(_DECAYS) + 2 + 2


class FactoredMlp(torch.optim.Optimizer):
    """Steps by a small network of features of each weight, as small_fc_lopt does (arXiv:2203.11860).

    The features are gradient, weight, momenta, the root of a second moment, and row and column factors of it, each
    divided by its root mean square over the tensor: so a step needs the whole tensor.

    Args:
        weights: a safetensors file with ``w1`` (16, 13), ``b1``, ``w2`` (2, 16) and ``b2``; None: random ones.
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0, weights: str | Path | None = None
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        if weights is not None:
            self.network = load_file(weights)
            return
        generator = torch.Generator().manual_seed(0)
        sizes = {"w1": (16, _FEATURES), "b1": (16,), "w2": (2, 16), "b2": (2,)}
        self.network = {name: 0.3 * torch.randn(size, generator=generator) for name, size in sizes.items()}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(1.0 - group["lr"] * group["weight_decay"])
                    p.add_(self._direction(p, self.state[p]), alpha=-group["lr"])

    def _direction(self, p: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        g = p.grad
        assert g is not None
        if not state:
            state["momenta"] = [torch.zeros_like(p) for _ in _DECAYS]
            state["square"] = torch.zeros_like(p)
            state["factors"] = {"row": g.new_zeros(p.shape[:1]), "column": g.new_zeros(p.shape[-1:])}
        for momentum, decay in zip(state["momenta"], _DECAYS, strict=True):
            momentum.lerp_(g, 1.0 - decay)
        state["square"].lerp_(g * g, 1e-3)
        square = (g * g).reshape(p.shape[0], -1)
        column = square.mean(0) if p.dim() > 1 else square.flatten()
        state["factors"]["row"].lerp_(square.mean(1), 1e-2)
        state["factors"]["column"].lerp_(column, 1e-2)
        root = (state["square"] + 1e-12).rsqrt()
        by_row = state["factors"]["row"].view(-1, *(1,) * (p.dim() - 1)).expand(p.shape)
        by_column = state["factors"]["column"].expand(p.shape)
        features = [g, p, root, *state["momenta"], *(m * root for m in state["momenta"]), by_row, by_column]
        features += [g * (one + 1e-12).rsqrt() for one in (by_row, by_column)]
        stacked = torch.stack([one * (one.square().mean() + 1e-12).rsqrt() for one in features], dim=-1)
        net = {name: one.to(p.device) for name, one in self.network.items()}
        out = torch.relu(stacked @ net["w1"].t() + net["b1"]) @ net["w2"].t() + net["b2"]
        return out[..., 0] * torch.exp(0.1 * out[..., 1])

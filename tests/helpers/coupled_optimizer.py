"""Optimizers with odd habits: VeLO's interface, CELO2's second weight decay, and new tensors in place of the old.

Those whose name begins with ``Sign`` step each element by itself.
"""

from __future__ import annotations

from typing import Any

import torch


class CoupledRnn(torch.optim.Optimizer):
    """A recurrent cell over features of the tensors, mixed by their maximum, gives each tensor's rate.

    Its step takes the loss, and each tensor's step depends on all tensors. Beside the state of tensors it saves what
    concerns all of them, in ``state_dict``, as VeLO does.
    """

    def __init__(self, params: Any, lr: float = 1e-3, num_steps: int = 100) -> None:
        super().__init__(params, {"lr": lr})
        self.num_steps = num_steps
        count = 0
        for group in self.param_groups:
            group["step"] = 0
            for p in group["params"]:
                self.state[p] = {"layer_idx": count, "mom": torch.zeros(*p.shape, 2), "none": torch.zeros(0)}
                count += 1
        generator = torch.Generator().manual_seed(1)
        self.weights = [0.3 * torch.randn(8, size, generator=generator) for size in (3, 8, 8)]
        self.hidden = (torch.zeros(count, 8), torch.zeros(1))
        self.losses = {"mean": torch.zeros(()), "count": torch.tensor(0, dtype=torch.int32)}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "loss_buffer": self.losses, "hidden": self.hidden, "num_steps": self.num_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.losses, self.hidden = state_dict.pop("loss_buffer"), state_dict.pop("hidden")
        self.num_steps = state_dict.pop("num_steps")
        super().load_state_dict(state_dict)

    @torch.no_grad()
    def step(self, loss: torch.Tensor) -> None:  # type: ignore[override]
        self.losses = {"mean": 0.9 * self.losses["mean"] + 0.1 * loss, "count": self.losses["count"] + 1}
        tensors = [p for group in self.param_groups for p in group["params"]]
        features = []
        for p in tensors:
            mom = self.state[p]["mom"]
            mom.lerp_(p.grad.unsqueeze(-1).expand_as(mom), torch.tensor([0.1, 0.01]))
            size = torch.log1p(p.grad.square().mean())
            features.append(torch.stack([size, mom.square().mean().sqrt(), self.losses["mean"]]))
        into, recurrent, mixing = self.weights
        x = torch.stack(features) @ into.t()
        x = x + (x @ mixing.t()).max(0).values
        self.hidden = (torch.tanh(x + self.hidden[0] @ recurrent.t()), self.hidden[1] + 1)
        for p, row in zip(tensors, self.hidden[0], strict=True):
            momentum = self.state[p]["mom"].mean(-1)
            p.sub_(self.param_groups[0]["lr"] * torch.exp(row.mean()) * momentum.sign())
        for group in self.param_groups:
            group["step"] += 1


class Replacing(torch.optim.Optimizer):
    """Divides gradients by their norm, and puts new tensors in the place of the old ones."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.data = p.data - group["lr"] * p.grad / (p.grad.norm() + 1e-6)


class DecaysVectors(torch.optim.Optimizer):
    """Decays vectors by a number of its own, as PyLO's CELO2 does: by default the constructor's weight decay.

    Matrices follow their gradient over its norm, vectors the gradient's sign.
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0, adam_weight_decay: float | None = None
    ) -> None:
        of_vectors = weight_decay if adam_weight_decay is None else adam_weight_decay
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "adam_weight_decay": of_vectors})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                decay = group["weight_decay" if p.dim() > 1 else "adam_weight_decay"]
                p.mul_(1.0 - group["lr"] * decay)
                p.sub_(group["lr"] * (self.direction(p.grad) if p.dim() > 1 else p.grad.sign()))

    @staticmethod
    def direction(gradient: torch.Tensor) -> torch.Tensor:
        return gradient / (gradient.norm() + 1e-6)


class DecayOfItsOwn(torch.optim.SGD):
    """Remembers the constructor's weight decay, whatever its parameter groups have; steps depend on the norm."""

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr=lr)
        self.decay = weight_decay

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * (self.direction(p.grad) + self.decay * p))

    @staticmethod
    def direction(gradient: torch.Tensor) -> torch.Tensor:
        return gradient / (gradient.norm() + 1e-6)


class SignDecaysVectors(DecaysVectors):
    """Decays like its parent, by which it takes slices of matrices for vectors."""

    @staticmethod
    def direction(gradient: torch.Tensor) -> torch.Tensor:
        return gradient.sign()


class SignDecayOfItsOwn(DecayOfItsOwn):
    """Decays like its parent."""

    @staticmethod
    def direction(gradient: torch.Tensor) -> torch.Tensor:
        return gradient.sign()

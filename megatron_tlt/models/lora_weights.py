"""Names of LoRA adapters, and what they add to a model's weights."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"
"""Suffixes of an adapter's tensors after the name of the adapted module, as in PEFT."""

PROJECTIONS = {
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
    "experts": ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"),
}
"""The projections of each group in ``actor.lora.targets``; ``experts`` are those below ``.experts.``."""


def is_adapted(tensor: str, targets: Collection[str]) -> bool:
    """Whether an adapter belongs to a Hugging Face tensor: a weight of a projection that ``targets`` name.

    A target is a group of ``PROJECTIONS`` or the name of a projection, which means those outside of experts.
    """
    module, _, kind = tensor.rpartition(".")
    projection = module.rpartition(".")[2]
    if kind != "weight":
        return False
    if ".experts." in tensor:
        return "experts" in targets and projection in PROJECTIONS["experts"]
    return any(projection in PROJECTIONS.get(target, (target,)) for target in targets if target != "experts")


def adapter_shapes(
    shapes: Mapping[str, tuple[int, ...]], targets: Collection[str], rank: int
) -> dict[str, tuple[int, ...]]:
    """Shapes of the adapters' tensors: A is (rank, in), B is (out, rank), in the order of the model's tensors."""
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        if is_adapted(name, targets):
            module = name.removesuffix(".weight")
            found |= {module + LORA_A: (rank, shape[1]), module + LORA_B: (shape[0], rank)}
    return found


def adapter_cut_dims(cut_dims: Mapping[str, int], adapters: Iterable[str]) -> dict[str, int]:
    """The dimension along which ranks of the actor cut each adapter's tensor, from that of the adapted weight."""
    found = {}
    for name in adapters:
        module = name.removesuffix(LORA_A).removesuffix(LORA_B)
        found[name] = cut_dims[f"{module}.weight"] if name.endswith(LORA_A) else 0
    return found


def merged(
    base: torch.Tensor, down: torch.Tensor, up: torch.Tensor, scale: float, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """``base + scale * up @ down``, computed in float32 and rounded once; shapes (out, in), (rank, in), (out, rank)."""
    added = up.float() @ down.float()
    return (base.float() + scale * added).to(base.dtype if dtype is None else dtype)

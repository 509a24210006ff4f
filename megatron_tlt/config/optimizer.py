"""``actor.optimizer_split`` and ``actor.lr_schedule``: which class steps which tensors, at which rate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, model_validator

from megatron_tlt.config.section import Fraction, NonNegativeFloat, Section


class OptimizerSplitConfig(Section):
    """``actor.optimizer`` steps the matrices, and the class that is given here the other tensors.

    ``matrices: layers`` are the two-dimensional weights of the layers, without embedding and LM head; ``all`` with
    these. ``optimizer`` is the import path of a class, which takes ``optimizer_arguments``.
    """

    matrices: Literal["layers", "all"] = "layers"
    optimizer: str = "torch.optim.AdamW"
    optimizer_arguments: dict[str, Any] = Field(default_factory=dict)
    lr: PositiveFloat
    weight_decay: NonNegativeFloat = 0.0


class LrScheduleConfig(Section):
    """The learning rate over the updates of a run, after ``actor.lr_warmup_steps`` of linear rise.

    ``linear`` and ``cosine`` fall to ``min_lr_fraction`` of the highest rate in ``trainer.steps``. ``wsd`` is constant
    and falls linearly in the last ``decay_fraction`` of them. The last update has the lowest rate; where that is 0, a
    rate above it, so that it changes something.
    """

    kind: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    min_lr_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    decay_fraction: Fraction = 0.2

    @model_validator(mode="after")
    def _each_has_an_effect(self) -> LrScheduleConfig:
        default = LrScheduleConfig.model_fields
        if self.kind == "constant" and self.min_lr_fraction:
            raise ValueError("min_lr_fraction: a constant rate does not fall; allowed: 0, or linear, cosine or wsd")
        if self.kind != "wsd" and self.decay_fraction != default["decay_fraction"].default:
            raise ValueError(f"decay_fraction: found kind {self.kind}; allowed: with wsd")
        return self

    def end(self, total: int) -> int:
        """The update, counted from 1, that has the lowest rate, in a run of ``total``: the last, or one after it."""
        return total if self.min_lr_fraction else total + 1

    def decay_steps(self, total: int) -> int:
        """Updates of a run of ``total`` in which a ``wsd`` rate falls; at least one."""
        return max(1, round(total * self.decay_fraction))


def is_matrix(name: str, shape: tuple[int, ...], matrices: Literal["layers", "all"]) -> bool:
    """Whether ``actor.optimizer`` steps this Hugging Face tensor (or adapter) under a split."""
    return len(shape) == 2 and (matrices == "all" or ".layers." in name)


def split_tensors(
    shapes: Mapping[str, tuple[int, ...]], split: OptimizerSplitConfig | None
) -> tuple[list[str], list[str]]:
    """The names that ``actor.optimizer`` steps and those that the split's class steps, in the model's order."""
    if split is None:
        return list(shapes), []
    chosen = {name: is_matrix(name, shape, split.matrices) for name, shape in shapes.items()}
    return [n for n, own in chosen.items() if own], [n for n, own in chosen.items() if not own]

"""``actor.lora``: low-rank adapters instead of all weights."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat

from megatron_tlt.config.section import PositiveInt, Section

Target = Literal[
    "attention", "mlp", "experts", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
]


class LoraConfig(Section):
    """Low-rank adapters: the update trains these alone, and only these move to the engines.

    ``targets`` are groups (``attention``, ``mlp``, ``experts``) or projections by Hugging Face's names (``q_proj``).
    Adapters are scaled by ``alpha / rank``; ``dropout`` is that of their inputs.
    """

    rank: PositiveInt = 16
    alpha: PositiveFloat = 32.0
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    targets: Annotated[tuple[Target, ...], Field(min_length=1)] = ("attention", "mlp")

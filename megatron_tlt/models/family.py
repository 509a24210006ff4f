"""The differences between model families, as data only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_PROJECTIONS = {"gate": "mlp.gate_proj.weight", "up": "mlp.up_proj.weight", "down": "mlp.down_proj.weight"}


@dataclass(frozen=True)
class Experts:
    """A mixture-of-experts layer, with the names of a family's Hugging Face config and weights.

    ``width`` is the config's key for an expert's intermediate size; ``normalize`` is the key that controls whether the
    chosen experts' probabilities are normalized to sum 1 (None: always). Names are relative to a layer.
    """

    width: str
    normalize: str | None
    router: str
    gate: str
    up: str
    down: str


@dataclass(frozen=True)
class Family:
    """A decoder with RMSNorm, SwiGLU, grouped-query attention and rotary positions.

    ``options`` are further config keys that would change the mathematics, each with its allowed values.
    """

    model_type: str
    qkv_bias: bool = False
    """Whether the query, key and value projections (only these) have biases."""
    qk_layernorm: bool = False
    """Whether each head's queries and keys have an RMSNorm."""
    experts: Experts | None = None
    options: dict[str, tuple[Any, ...]] = field(default_factory=dict)

    def projections(self, expert: int | None = None) -> dict[str, str]:
        """Names of a layer's gate, up and down projections, of one expert or of a dense layer."""
        if expert is None or self.experts is None:
            return _PROJECTIONS
        names = {"gate": self.experts.gate, "up": self.experts.up, "down": self.experts.down}
        return {key: name.format(expert=expert) for key, name in names.items()}

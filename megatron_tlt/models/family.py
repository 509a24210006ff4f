"""What sets one model family apart from another: data only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_PROJECTIONS = {"gate": "mlp.gate_proj.weight", "up": "mlp.up_proj.weight", "down": "mlp.down_proj.weight"}


@dataclass(frozen=True)
class Experts:
    """A mixture-of-experts layer, as a family's Hugging Face config and weights name it.

    ``width`` is the config's key of an expert's intermediate size; ``normalize`` the key that says whether the chosen
    experts' probabilities are made to sum to 1 (None: they always are). Names are relative to a layer.
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

    ``options`` are further keys of its config that would change the mathematics, each with the values that are allowed.
    """

    model_type: str
    qkv_bias: bool = False
    """Biases of the query, key and value projections, and of no others."""
    qk_layernorm: bool = False
    """RMSNorm of each head's queries and keys."""
    experts: Experts | None = None
    options: dict[str, tuple[Any, ...]] = field(default_factory=dict)

    def projections(self, expert: int | None = None) -> dict[str, str]:
        """Names of the gate, up and down projections in a layer, of one expert or of a dense layer."""
        if expert is None or self.experts is None:
            return _PROJECTIONS
        names = {"gate": self.experts.gate, "up": self.experts.up, "down": self.experts.down}
        return {key: name.format(expert=expert) for key, name in names.items()}

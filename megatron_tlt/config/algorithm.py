"""The ``algorithm`` section of a launch config."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from megatron_tlt.config.section import NonNegativeFloat, PositiveInt, Section

RECIPES: dict[str, dict[str, Any]] = {
    "dr_grpo": {"normalize_by_std": False},
    "rloo": {"normalize_by_std": False},
    "reinforce": {"normalize_by_std": False},
    "reinforce++": {"normalize_by_std": False},
    "reinforce++_baseline": {"normalize_by_std": False},
    "gspo": {"loss": "gspo", "loss_aggregation": "sequence_mean", "clip_low": 3e-4, "clip_high": 4e-4},
    "cispo": {"loss": "cispo", "clip_low": 10.0, "clip_high": 0.2},
}
"""``algorithm.name`` -> defaults of other keys of the section. Keys in the launch config take precedence.

Sources: Dr. GRPO 2503.20783, section 3.2; GSPO 2507.18071, section 5.1; CISPO 2506.13585, section 3.1 (a lower bound so
wide that it never applies, as verl sets it).
"""


class MismatchConfig(Section):
    """Handling of the difference between the rollout's and the actor's log-probs.

    ``fail`` stops the run if a step's mean absolute difference exceeds ``threshold``; ``correct`` multiplies each
    token's loss by min(exp(actor - rollout), ``truncation``); ``log`` only records it.
    """

    action: Literal["log", "correct", "fail"] = "log"
    threshold: Annotated[float, Field(gt=0)] = 0.1
    truncation: Annotated[float, Field(ge=1.0)] = 2.0


class KlConfig(Section):
    """The penalty for leaving the reference policy, which is the initial policy; ``coefficient`` 0: none.

    ``loss`` adds the estimate of each token to its loss; ``reward`` subtracts the sum over a response from its reward,
    before advantages. Estimators: see ``algorithms.kl``.
    """

    coefficient: NonNegativeFloat = 0.0
    estimator: Literal["k1", "k2", "k3", "low_variance"] = "k3"
    placement: Literal["loss", "reward"] = "loss"


class AlgorithmConfig(Section):
    """Credit assignment and loss.

    ``name`` is one of ``algorithms.registry.ALGORITHMS`` or the import path of a subclass of ``algorithms.algorithm``'s
    ``Algorithm``, which takes ``arguments``. Some names are recipes and change the defaults of other keys
    (``RECIPES``). ``loss`` is one of ``algorithms.registry.LOSSES`` or the import path of a class that takes this
    section. ``dual_clip`` (above 1) bounds the loss of tokens with a negative advantage.

    ``loss_aggregation``: ``token_mean`` weights every response token of a mini-batch equally, ``sequence_mean`` every
    response; ``sequence_sum_norm`` divides each response's sum by ``sequence_norm_tokens``, a constant.
    """

    name: str = "grpo"
    arguments: dict[str, Any] = Field(default_factory=dict)
    group_size: Annotated[int, Field(ge=2)] = 8
    normalize_by_std: bool = True
    loss: str = "clipped"
    clip_low: NonNegativeFloat = 0.2
    clip_high: NonNegativeFloat = 0.2
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    loss_aggregation: Literal["token_mean", "sequence_mean", "sequence_sum_norm"] = "token_mean"
    sequence_norm_tokens: PositiveInt | None = None
    kl: KlConfig = KlConfig()
    entropy_coefficient: NonNegativeFloat = 0.0
    mismatch: MismatchConfig = MismatchConfig()

    @model_validator(mode="before")
    @classmethod
    def _apply_recipe(cls, values: Any) -> Any:
        return RECIPES.get(values.get("name", ""), {}) | values if isinstance(values, dict) else values

    @property
    def recipe_values(self) -> dict[str, Any]:
        """The keys that have their value from the recipe named by ``name``."""
        return {key: value for key, value in RECIPES.get(self.name, {}).items() if getattr(self, key) == value}

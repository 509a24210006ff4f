"""The ``algorithm`` section of a launch config."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from megatron_tlt.config.section import Fraction, NonNegativeFloat, NonNegativeInt, PositiveInt, Section

RECIPES: dict[str, dict[str, Any]] = {
    "dr_grpo": {"normalize_by_std": False},
    "rloo": {"normalize_by_std": False},
    "reinforce": {"normalize_by_std": False},
    "reinforce++": {"normalize_by_std": False},
    "reinforce++_baseline": {"normalize_by_std": False},
    "dapo": {
        "clip_high": 0.28,
        "dynamic_sampling": {"enabled": True},
        "overlong": {"penalty": 1.0},
    },
    "gspo": {"loss": "gspo", "loss_aggregation": "sequence_mean", "clip_low": 3e-4, "clip_high": 4e-4},
    "cispo": {"loss": "cispo", "clip_low": 10.0, "clip_high": 0.2},
    "distillation": {"kl": {"coefficient": 1.0, "estimator": "k2"}},
}
"""``algorithm.name`` -> defaults of other keys of the section. Keys in the launch config take precedence.

Sources: Dr. GRPO 2503.20783, section 3.2; DAPO 2503.14476; GSPO 2507.18071, section 5.1; CISPO 2506.13585, section 3.1
(a lower bound so wide that it never applies, as verl sets it).
"""

PositiveFloat = Annotated[float, Field(gt=0)]


def _ascending(bounds: tuple[float, float]) -> tuple[float, float]:
    if not 0 <= bounds[0] <= 1 <= bounds[1]:
        raise ValueError("a lower bound from 0 to 1 and an upper bound from 1, around the ratio of equal policies")
    return bounds


Bounds = Annotated[tuple[float, float], AfterValidator(_ascending)]
"""The lower and the upper bound of a ratio of probabilities."""


def _moved_action(value: Any) -> Any:
    if value == "correct":
        raise ValueError("log or fail; a correction is algorithm.correction.weights: token")
    return value


class MismatchConfig(Section):
    """Handling of the difference between the rollout's and the actor's log-probs.

    ``fail`` stops the run if a step's mean absolute difference exceeds ``threshold``; ``log`` only records it.
    """

    action: Annotated[Literal["log", "fail"], BeforeValidator(_moved_action)] = "log"
    threshold: PositiveFloat = 0.1


class CorrectionConfig(Section):
    """Corrections for that difference, by the ratio pi_actor / pi_rollout of each token: see ``algorithms.correction``.

    ``weights`` multiplies the loss of a token by its ratio, or by the product of the ratios of its response, at most
    ``truncation`` (TIS). Outside of ``token_bounds`` the weight is 0 (IcePop: ``weights: token``, ``truncation: 5``,
    ``token_bounds: [0.5, 5]``). A response is left out of the loss if the geometric mean of its ratios is outside
    ``geometric_mean_bounds``, its mean log-ratio above ``max_k1`` in size, or its k3 estimate above ``max_k3`` (nats).

    ``opsm_delta`` gives tokens of a response with a negative advantage weight 0 once the trained policy has moved from
    the old one by more than that, in nats per token (OPSM, DeepSeek-V3.2). ``bypass`` takes the rollout's log-probs for
    the old policy's, which saves a pass over the responses.
    """

    weights: Literal["none", "token", "sequence"] = "none"
    truncation: Annotated[float, Field(ge=1.0)] = 2.0
    token_bounds: Bounds | None = None
    geometric_mean_bounds: Bounds | None = None
    max_k1: PositiveFloat | None = None
    max_k3: PositiveFloat | None = None
    opsm_delta: PositiveFloat | None = None
    bypass: bool = False

    @property
    def rejects(self) -> bool:
        """Whether whole responses can be left out."""
        return (self.geometric_mean_bounds, self.max_k1, self.max_k3) != (None, None, None)

    @property
    def compares(self) -> bool:
        """Whether it needs the log-probs of the rollout and of the actor."""
        return self.weights != "none" or self.token_bounds is not None or self.rejects


class KlConfig(Section):
    """The penalty for leaving the reference policy; ``coefficient`` 0: none.

    The reference is the initial policy, or the policy as it was after the last multiple of ``update_every`` steps, or
    the Hugging Face model in the folder ``reference`` (a teacher of the same vocabulary).

    ``loss`` adds the estimate of each token to its loss; ``reward`` subtracts the sum over a response from its reward,
    before advantages. Estimators: see ``algorithms.kl``.
    """

    coefficient: NonNegativeFloat = 0.0
    estimator: Literal["k1", "k2", "k3", "low_variance"] = "k3"
    placement: Literal["loss", "reward"] = "loss"
    reference: Path | None = None
    update_every: NonNegativeInt = 0

    @model_validator(mode="after")
    def _one_reference(self) -> KlConfig:
        if self.reference is not None and self.update_every:
            raise ValueError(
                "found reference and update_every; allowed: one of them, as an update replaces the reference"
            )
        if not self.coefficient and (self.reference is not None or self.update_every):
            raise ValueError("coefficient is 0, so there is no reference; allowed: a coefficient above 0")
        return self


class DynamicSamplingConfig(Section):
    """Draws problems until ``trainer.prompts_per_step`` of them have responses with different rewards.

    A step has at most ``max_generations`` rollouts, each of ``over_sample`` times the missing problems.
    """

    enabled: bool = False
    max_generations: PositiveInt = 10
    over_sample: Annotated[float, Field(ge=1.0)] = 1.0


class OverlongConfig(Section):
    """Handling of long responses.

    ``penalty`` times a punishment that grows from 0 to 1 over the last ``buffer`` part of
    ``rollout.max_response_tokens`` is subtracted from the reward. ``filter`` leaves truncated responses out of the
    loss.
    """

    penalty: NonNegativeFloat = 0.0
    buffer: Fraction = 0.2
    filter: bool = False


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
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    overlong: OverlongConfig = OverlongConfig()
    mismatch: MismatchConfig = MismatchConfig()
    correction: CorrectionConfig = CorrectionConfig()

    @model_validator(mode="before")
    @classmethod
    def _apply_recipe(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        found = RECIPES.get(values.get("name", ""), {}) | values
        for key, value in RECIPES.get(values.get("name", ""), {}).items():
            if isinstance(value, dict) and isinstance(found[key], dict):
                found[key] = value | found[key]
        return found

    @property
    def recipe_values(self) -> dict[str, Any]:
        """The keys, such as ``kl.coefficient``, that have the value of the recipe named by ``name``."""
        found = {}
        for key, value in RECIPES.get(self.name, {}).items():
            own = getattr(self, key)
            for name, each in value.items() if isinstance(value, dict) else (("", value),):
                if (getattr(own, name) if name else own) == each:
                    found[f"{key}.{name}".rstrip(".")] = each
        return found

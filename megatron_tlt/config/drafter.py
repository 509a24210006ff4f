"""The sections of the learned drafter and its training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from megatron_tlt.config.drafter_kinds import KindName, kind_default, kind_of
from megatron_tlt.config.section import Fraction, NonNegativeFloat, NonNegativeInt, PositiveInt, Section


class DrafterLossConfig(Section):
    """The training loss of the drafter.

    ``name`` selects the loss between the drafter's and the target's distribution, weighted by ``distribution_weight``:
    ``eagle`` is cross entropy, ``kl`` KL divergence, ``tv`` total variation. EAGLE adds ``regression_weight`` times the
    SmoothL1 loss of its hidden states (default 0.5 with ``eagle``, else 0; EAGLE-3 has none). ``reward_weighting``
    multiplies a response's loss by its reward, scaled from ``reward_low .. reward_high`` to 0..1 and clipped below at
    ``reward_floor``.
    """

    name: Literal["eagle", "kl", "tv"] = "eagle"
    distribution_weight: Annotated[float, Field(gt=0)] = 0.5
    regression_weight: NonNegativeFloat | None = None
    reward_weighting: bool = False
    reward_low: float = 0.0
    reward_high: float = 1.0
    reward_floor: Annotated[float, Field(ge=0.0, le=1.0)] = 0.1

    @model_validator(mode="after")
    def _bounds_in_order(self) -> DrafterLossConfig:
        if self.reward_low >= self.reward_high:
            raise ValueError(f"reward_low is {self.reward_low}; must be below reward_high, {self.reward_high}")
        return self


# Bytes of a response in the buffer in addition to its tensors.
ENTRY_OVERHEAD_BYTES = 4096


class DrafterBufferConfig(Section):
    """The online data buffer of one rank.

    Its files take at most ``disk_bytes``, of which up to ``memory_bytes`` are also kept in memory. With ``disk_bytes``
    0, data is in memory only and is lost when the process ends. Responses referenced by the newest two checkpoints
    stay on disk after the buffer drops them, in at most twice ``disk_bytes`` more. Responses are dropped when they are
    more than ``max_age`` steps old. ``earlier_fraction`` of a batch is drawn from earlier steps, newest steps first,
    with probability proportional to length.
    """

    memory_bytes: PositiveInt = 1 << 30
    disk_bytes: NonNegativeInt = 8 << 30
    max_age: NonNegativeInt = 2
    earlier_fraction: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5


class DrafterConfig(Section):
    """The learned drafter and its training on ``entries_per_step`` responses per rank and step.

    Every RL step runs ``session_steps`` drafter steps after its update. With a ``spot`` section ``session_steps`` has
    no effect: idle ranks train as long as the rollout lasts, and ``spot.min_steps`` sets the minimum.

    On a real model EAGLE-3 learns more per second than EAGLE, in particular with a ``draft_vocab_size`` (`tlt bench
    drafter-grid`). The default ``lr`` of 3e-4 is a safe choice for EAGLE-3: with three unrolled drafts 1e-3 learns
    faster. EAGLE's default is 1e-4, as larger rates diverge.

    ``path`` is the folder of the initial drafter; without it, training starts from the target's last layer.
    ``unroll_steps`` consecutive drafts are trained (3 by default); the loss of each further one
    is multiplied by ``unroll_decay``. ``feature_noise`` is the half-width of uniform noise on the input features.

    ``draft_vocab_size`` is the number of tokens that can be drafted (default: all); the first training step chooses the
    tokens that are most likely under the policy. Only EAGLE-3 supports it: an EAGLE head drafts with the target's own
    LM head.

    ``dtype`` is the type of matrix products in training (weights stay in float32; the policy's LM head has the
    policy's type). The default is bfloat16 on a GPU and float32 on a CPU. CPUs with AMX or AVX-512 BF16 are faster in
    bfloat16, others far slower.
    """

    kind: KindName = "eagle3"
    path: Path | None = None
    aux_hidden_state_layer_ids: list[NonNegativeInt] | None = None
    draft_vocab_size: PositiveInt | None = None
    loss: DrafterLossConfig = DrafterLossConfig()
    buffer: DrafterBufferConfig = DrafterBufferConfig()
    optimizer: str = "torch.optim.AdamW"
    optimizer_arguments: dict[str, Any] = Field(default_factory=dict)
    lr: Annotated[float, Field(gt=0)] = 3e-4
    weight_decay: NonNegativeFloat = 0.0
    warmup_steps: NonNegativeInt = 0
    clip_grad: NonNegativeFloat = 1.0
    session_steps: PositiveInt = 20
    entries_per_step: PositiveInt = 16
    max_tokens_per_micro_batch: PositiveInt = 8192
    logit_chunk_tokens: PositiveInt = 1024
    unroll_steps: PositiveInt | None = None
    unroll_decay: Fraction = 0.8
    feature_noise: NonNegativeFloat = 0.0
    dtype: Literal["float32", "bfloat16"] | None = None

    @property
    def steps(self) -> int:
        """Number of consecutive drafts that are trained."""
        return self.unroll_steps or kind_of(self.kind).unroll_steps

    def entry_bytes(self, tokens: int, hidden_size: int) -> int:
        """Bytes of a response in the buffer; ``tokens`` counts prompt and response."""
        return tokens * (2 * kind_of(self.kind).states_per_token * hidden_size + 4) + ENTRY_OVERHEAD_BYTES

    @property
    def regression_weight(self) -> float:
        """The effective weight of the regression loss."""
        default = (kind_of(self.kind).regression_weight or 0.0) if self.loss.name == "eagle" else 0.0
        return default if self.loss.regression_weight is None else self.loss.regression_weight

    @model_validator(mode="before")
    @classmethod
    def _rate_of_kind(cls, values: Any) -> Any:
        kind = kind_default(values, cls.model_fields["kind"].default)
        return values if kind is None else {"lr": kind.lr} | values

    @model_validator(mode="after")
    def _kind_has_options(self) -> DrafterConfig:
        kind = kind_of(self.kind)
        if kind.regression_weight is None and self.loss.regression_weight:
            found = self.loss.regression_weight
            raise ValueError(f"loss.regression_weight is {found}; {kind.title} has none, allowed: 0")
        if not kind.num_aux_layers and self.aux_hidden_state_layer_ids is not None:
            layers = self.aux_hidden_state_layer_ids
            raise ValueError(f"aux_hidden_state_layer_ids is {layers}; {kind.title} takes none, allowed: null")
        if not kind.own_head and self.draft_vocab_size is not None:
            raise ValueError(
                f"draft_vocab_size is {self.draft_vocab_size}; an {kind.title} head has all tokens, allowed: null"
            )
        return self

"""The sections of the learned drafter and its training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from megatron_tlt.config.drafter_kinds import KindName, kind_default, kind_of
from megatron_tlt.config.section import Fraction, NonNegativeFloat, NonNegativeInt, PositiveInt, Section


class DrafterLossConfig(Section):
    """What the drafter learns from.

    ``name`` compares its distribution with the target's: ``eagle`` by cross entropy, ``kl`` by KL divergence, ``tv``
    by total variation, times ``distribution_weight``. ``regression_weight`` times SmoothL1 of EAGLE's hidden states
    comes on top (0.5 with ``eagle``, else 0, unless given; EAGLE-3 has none). ``reward_weighting`` multiplies a
    response's loss by its reward, scaled from ``reward_low .. reward_high`` to 0..1 and at least ``reward_floor``.
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


# What a response takes in the buffer beside its tensors.
ENTRY_OVERHEAD_BYTES = 4096


class DrafterBufferConfig(Section):
    """The online data buffer of one rank.

    What it holds takes at most ``disk_bytes`` in files, of which up to ``memory_bytes`` is in memory too; 0 means
    memory alone, which does not survive the process. Responses that the newest two checkpoints refer to stay on disk
    after the buffer drops them, in at most twice as much again. Responses are dropped once they are more than
    ``max_age`` steps old. ``earlier_fraction`` of a batch is drawn from earlier steps, the newest of them first, with
    weight proportional to length.
    """

    memory_bytes: PositiveInt = 1 << 30
    disk_bytes: NonNegativeInt = 8 << 30
    max_age: NonNegativeInt = 2
    earlier_fraction: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5


class DrafterConfig(Section):
    """The learned drafter and its training: steps on ``entries_per_step`` responses per rank.

    Every RL step has ``session_steps`` of them after its update. With a ``spot`` section these have no effect: idle
    ranks train as long as the rollout lasts, and ``spot.min_steps`` sets the minimum.

    On a real model EAGLE-3 learns more per second than EAGLE, the more so with a ``draft_vocab_size`` (`tlt bench
    drafter-grid`). Its default ``lr`` of 3e-4 is the safe one there: with three drafts in a row 1e-3 learns faster.
    EAGLE's is 1e-4, as larger ones diverge.

    ``path`` starts it from a folder, else from the target's last layer. ``unroll_steps`` drafts are trained behind one
    another (3 for EAGLE and 4 for EAGLE-3 unless given), the loss of each further one times ``unroll_decay``.
    ``feature_noise`` is the half-width of uniform noise on the features it reads.

    ``draft_vocab_size`` tokens can be drafted, all unless given; the first training step chooses those that the policy
    is likeliest to say. EAGLE-3 alone can have fewer than all: an EAGLE head drafts with the target's own LM head.

    ``dtype`` is what its matrix products are computed in while it trains (weights stay in float32): bfloat16 on a GPU
    and float32 on a CPU unless given; the policy's LM head has the policy's. CPUs with AMX or AVX-512 BF16 are faster
    in bfloat16, others far slower.
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
        """Drafts trained behind one another."""
        return self.unroll_steps or kind_of(self.kind).unroll_steps

    def entry_bytes(self, tokens: int, hidden_size: int) -> int:
        """What a response takes in the buffer, of so many tokens with its prompt."""
        return tokens * (2 * kind_of(self.kind).states_per_token * hidden_size + 4) + ENTRY_OVERHEAD_BYTES

    @property
    def regression_weight(self) -> float:
        """The weight of the regression that is in force."""
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

"""The sections of speculative decoding in rollout."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from megatron_tlt.config.drafter_kinds import KINDS, PATH_PATTERN, DrafterName
from megatron_tlt.config.section import Fraction, NonNegativeFloat, NonNegativeInt, PositiveInt, Section

_NUMBER = r"-[1-9]\d*(-by-length)?"
_MODEL = "|".join((*KINDS, PATH_PATTERN))
_PATTERN = rf"^(off|ngram{_NUMBER}|(suffix|(suffix\+)?({_MODEL})){_NUMBER}(-p[1-9]\d?)?)$"
# YAML reads unquoted off as false
StrategyName = Annotated[str, BeforeValidator(lambda name: "off" if name is False else name), Field(pattern=_PATTERN)]


MIN_EPOCH_WEIGHT = 2.0**-12
"""Minimum weight of the window's oldest step relative to its newest: then sums of weights are exact in float64."""


class NgramConfig(Section):
    """The n-gram drafter: minimum and maximum length of matched n-grams."""

    prompt_lookup_min: PositiveInt = 2
    prompt_lookup_max: Annotated[int, Field(gt=0, le=64)] = 4


class SuffixConfig(Section):
    """The suffix-tree drafter, which keeps earlier responses to a problem.

    There is one tree per problem or one for all (``scope``), and with ``own_tree`` one for each request's own prompt
    and response. Trees contain the current step and the last ``window`` steps that had the problem; the weight of a
    step is ``epoch_decay`` times that of the next one. Every engine stores the responses of all engines. ``max_bytes``
    bounds the stored responses and the trees of one engine; the responses take at most half of it. A match of m tokens
    gives up to ``factor * m + offset`` drafts, while a token's probability is at least ``min_probability``.
    """

    scope: Literal["problem", "global"] = "problem"
    own_tree: bool = True
    window: NonNegativeInt = 16
    epoch_decay: Fraction = 0.8
    max_depth: Annotated[int, Field(ge=2, le=1024)] = 32
    max_bytes: Annotated[int, Field(ge=1 << 20)] = 1 << 30
    factor: NonNegativeFloat = 1.0
    offset: float = 0.0
    min_probability: Annotated[float, Field(ge=0.0, le=1.0)] = 0.1

    @model_validator(mode="after")
    def _drafts_something(self) -> SuffixConfig:
        if self.factor + self.offset < 1.0:
            raise ValueError(
                f"factor is {self.factor} and offset {self.offset}; allowed: a sum of at least 1, as otherwise a match "
                "of one token gives no draft"
            )
        return self

    @model_validator(mode="after")
    def _oldest_step_counts(self) -> SuffixConfig:
        if self.epoch_decay**self.window < MIN_EPOCH_WEIGHT:
            raise ValueError(
                f"epoch_decay is {self.epoch_decay} and window {self.window}; allowed: a decay with which the window's "
                f"oldest step has at least 1/{1 / MIN_EPOCH_WEIGHT:.0f} of the newest one's weight"
            )
        return self


class SkippedConfig(Section):
    """Storage for the hidden states of steps that the head skipped, so that it can continue after them.

    An engine keeps the states of the last ``window`` tokens of a request, ``max_bytes`` in all, and drops the oldest
    first. After a longer gap the head drafts with a shorter context.
    """

    window: NonNegativeInt = 1024
    max_bytes: NonNegativeInt = 256 << 20


class AdaptiveConfig(Section):
    """Choice of the strategy during decoding.

    Speculation starts after ``patience`` consecutive engine steps with at most ``threshold`` requests, and stops above
    ``threshold + hysteresis``. The tuner learns about batches up to that size, or up to ``rollout.vllm.max_num_seqs``
    if that is smaller. A choice is held for ``hold_steps`` engine steps. ``strategies`` are names such as off, ngram-3
    and eagle-5; the default is a selection for each of the engine's drafters. ``suffix+eagle3-5`` drafts with the head
    where the suffix tree has no likely match. ``eagle3-5-p50`` omits drafts whose estimated acceptance probability is
    below 50 %, judged by the drafter's most likely tokens even if it samples others. ``options`` are tuner-specific.
    ``lengths`` sets each request's draft budget by its expected response length, for all strategies. ``classes`` gives
    long responses all drafts, medium ones half and short ones none. ``optimal`` gives the budgets that finish the batch
    soonest; it needs only the longest strategy of each drafter.
    """

    tuner: Literal["static", "beg_mab", "solver"] = "beg_mab"
    strategies: list[StrategyName] = Field(default_factory=list)
    options: dict[str, Any] = Field(default_factory=dict)
    threshold: PositiveInt = 32
    patience: PositiveInt = 3
    hysteresis: NonNegativeInt = 4
    hold_steps: Annotated[int, Field(ge=2)] = 4
    lengths: Literal["classes", "optimal"] | None = None


class SpeculationConfig(Section):
    """Speculative decoding in rollout; never changes the distribution of the responses.

    ``drafter`` is ``ngram``, ``suffix``, or a kind of drafter model (``config/drafter_kinds.py``), by name or import
    path. ``path`` is the folder of such a model; if it lacks the embedding or LM head, the policy's are used.
    A head drafts its most likely token (``draft_sample_method`` greedy) or samples from its distribution
    (probabilistic), which is better if that is close to the policy's. The names are vLLM's.
    Without ``adaptive`` every step drafts ``num_speculative_tokens`` with ``drafter``. With it, a step drafts at most
    that many, with that drafter, a model-free one, or none.
    """

    enabled: bool = True
    drafter: DrafterName = "ngram"
    path: Path | None = None
    draft_sample_method: Literal["greedy", "probabilistic"] = "greedy"
    num_speculative_tokens: PositiveInt = 3
    ngram: NgramConfig = NgramConfig()
    suffix: SuffixConfig = SuffixConfig()
    skipped: SkippedConfig = SkippedConfig()
    adaptive: AdaptiveConfig | None = None

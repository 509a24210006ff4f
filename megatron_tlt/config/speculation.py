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
# YAML reads an unquoted off as false
StrategyName = Annotated[str, BeforeValidator(lambda name: "off" if name is False else name), Field(pattern=_PATTERN)]


class NgramConfig(Section):
    """The n-gram drafter: the shortest and longest n-gram it matches."""

    prompt_lookup_min: PositiveInt = 2
    prompt_lookup_max: PositiveInt = 4


class SuffixConfig(Section):
    """The suffix-tree drafter: what it keeps of earlier responses to a problem, and for how long.

    A tree per problem, or one of all (``scope``), and with ``own_tree`` one of each request's own prompt and response.
    The last ``window`` steps that had the problem count besides the running one, each ``epoch_decay`` of the one after
    it. Every engine keeps the responses of all engines. ``max_bytes`` bounds these and the trees of one engine; past
    responses take at most half of it. A match of m tokens is drafted from for up to ``factor * m + offset``, as
    long as a token's probability is at least ``min_probability``.
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
                f"factor is {self.factor} and offset {self.offset}; allowed: a sum of 1 and more, or a match of one "
                "token is never drafted from"
            )
        return self


class SkippedConfig(Section):
    """What an engine keeps of steps that its head took no part in, so that the head can go on behind them.

    Hidden states of at most the last ``window`` tokens of a request, ``max_bytes`` in all; the oldest go first. Behind
    a longer gap the head drafts with less to look back to.
    """

    window: NonNegativeInt = 1024
    max_bytes: NonNegativeInt = 256 << 20


class AdaptiveConfig(Section):
    """Which strategy is in force, chosen while decoding goes on.

    Speculation begins once ``patience`` engine steps in a row had at most ``threshold`` requests, and ends above
    ``threshold + hysteresis``: the tuner learns about batches up to that, or up to ``rollout.vllm.max_num_seqs`` where
    that is less. A choice is held for ``hold_steps`` engine steps. ``strategies`` are names like off, ngram-3 and
    eagle-5; without any, some of each drafter that the engine has. ``suffix+eagle3-5`` drafts with the head where the
    suffix tree has no likely match; ``eagle3-5-p50`` leaves out drafts that the drafter gives a chance below 50 % of
    being accepted, by its likeliest tokens also where it draws others. ``options`` are the tuner's own.
    ``lengths`` gives requests drafts by the length that their responses are expected to have, under all strategies:
    the long ones all, medium ones half and short ones none (``classes``), or those that end the batch soonest
    (``optimal``, for which the most of each drafter is strategy enough).
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
    path. ``path`` is the folder of such a model; embedding and output head that it lacks are the policy's.
    A head drafts its likeliest token (``draft_sample_method`` greedy) or one drawn from its distribution
    (probabilistic), which pays where that is close to the policy's. The names are vLLM's.
    Without ``adaptive`` every step drafts ``num_speculative_tokens`` by ``drafter``; with it, at most that many, by
    that drafter or one without a model, or none.
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

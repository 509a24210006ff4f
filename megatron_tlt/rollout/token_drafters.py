"""The drafters without a model that an engine has."""

from __future__ import annotations

from megatron_tlt.config.speculation import SpeculationConfig
from megatron_tlt.rollout.adaptive import strategies_of
from megatron_tlt.speculation.ngram import NgramConfig, NgramDrafter
from megatron_tlt.speculation.suffix import SuffixConfig, SuffixDrafter
from megatron_tlt.speculation.suffix_tree import SpeculationRule
from megatron_tlt.speculation.token_drafter import TokenDrafter


def token_drafters_of(speculation: SpeculationConfig) -> dict[str, TokenDrafter]:
    """The drafters without a model that a section's strategies name."""
    named = {drafter for strategy in strategies_of(speculation) for drafter in strategy.drafters}
    ngram, suffix = speculation.ngram, speculation.suffix
    found: dict[str, TokenDrafter] = {}
    if "ngram" in named:
        found["ngram"] = NgramDrafter(
            NgramConfig(
                min_n=ngram.prompt_lookup_min,
                max_n=ngram.prompt_lookup_max,
                max_draft=speculation.num_speculative_tokens,
            )
        )
    if "suffix" in named:
        found["suffix"] = SuffixDrafter(
            SuffixConfig(
                scope=suffix.scope,
                own_tree=suffix.own_tree,
                max_depth=suffix.max_depth,
                window=suffix.window,
                epoch_decay=suffix.epoch_decay,
                max_bytes=suffix.max_bytes,
                rule=SpeculationRule(suffix.factor, suffix.offset, suffix.min_probability),
            )
        )
    return found

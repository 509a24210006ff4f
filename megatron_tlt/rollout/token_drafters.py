"""The token drafters (drafters without a model) of an engine."""

from __future__ import annotations

from megatron_tlt.config.speculation import SpeculationConfig
from megatron_tlt.rollout.adaptive import strategies_of
from megatron_tlt.speculation.ngram import NgramDrafter
from megatron_tlt.speculation.suffix import SuffixDrafter
from megatron_tlt.speculation.token_drafter import TokenDrafter


def token_drafters_of(speculation: SpeculationConfig) -> dict[str, TokenDrafter]:
    """Build the token drafters that a section's strategies name."""
    named = {drafter for strategy in strategies_of(speculation) for drafter in strategy.drafters}
    found: dict[str, TokenDrafter] = {}
    if "ngram" in named:
        found["ngram"] = NgramDrafter(speculation.ngram, speculation.num_speculative_tokens)
    if "suffix" in named:
        found["suffix"] = SuffixDrafter(speculation.suffix)
    return found

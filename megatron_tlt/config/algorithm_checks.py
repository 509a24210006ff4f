"""Rules between the keys of the ``algorithm`` section."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_tlt.config.algorithm import RECIPES
from megatron_tlt.config.reward import LEAST_ADAPTIVE_S
from megatron_tlt.config.schema import TltConfig


def algorithm_violations(config: TltConfig) -> Iterator[str]:
    """One line for each key that contradicts another, or that nothing would read."""
    algorithm = config.algorithm
    if algorithm.normalize_by_std and RECIPES.get(algorithm.name, {}).get("normalize_by_std") is False:
        yield (
            f"algorithm.normalize_by_std: found true; {algorithm.name} never divides by it; allowed: false, or absent"
        )
    if algorithm.name == "dr_grpo" and algorithm.loss_aggregation == "sequence_mean":
        yield (
            "algorithm.loss_aggregation: found sequence_mean; dr_grpo weights tokens equally; "
            "allowed: token_mean, sequence_sum_norm"
        )
    if algorithm.name == "distillation" and algorithm.kl.reference is None:
        yield "algorithm.kl.reference: absent; distillation learns from it; allowed: a teacher's Hugging Face folder"
    if algorithm.name == "distillation" and algorithm.kl.placement == "reward":
        yield (
            "algorithm.kl.placement: found reward; distillation takes no credit from rewards, so the teacher would "
            "train nothing; allowed: loss"
        )
    if algorithm.dual_clip is not None and algorithm.loss in ("gspo", "cispo"):
        found = f"{algorithm.dual_clip:g}; loss {algorithm.loss} has no such bound"
        yield f"algorithm.dual_clip: found {found}; allowed: null"
    if algorithm.kl.update_every and config.actor.lora is not None:
        found = f"{algorithm.kl.update_every}; with actor.lora the reference is the policy without adapters"
        yield f"algorithm.kl.update_every: found {found}; allowed: 0"
    if config.rewards.adaptive_timeout and config.run.deterministic:
        yield (
            "rewards.adaptive_timeout: found true; verdicts then depend on measured times; "
            "allowed with run.deterministic: false"
        )
    if config.rewards.adaptive_timeout and config.rewards.timeout_s <= LEAST_ADAPTIVE_S:
        yield (
            f"rewards.timeout_s: found {config.rewards.timeout_s:g}; adaptive_timeout shortens it to "
            f"{LEAST_ADAPTIVE_S:g} s at least, so nothing would change; allowed: above {LEAST_ADAPTIVE_S:g}"
        )
    if algorithm.correction.bypass:
        if algorithm.correction.compares:
            yield (
                "algorithm.correction: found bypass with weights, bounds or rejections; these compare the rollout's "
                "log-probs with the actor's, which bypass does not compute; allowed: one of both"
            )
        if algorithm.mismatch.action == "fail":
            yield "algorithm.mismatch.action: found fail; correction.bypass measures no mismatch; allowed: log"
    summed = algorithm.loss_aggregation == "sequence_sum_norm"
    if summed and algorithm.sequence_norm_tokens is None:
        longest = config.rollout.max_response_tokens
        yield (
            "algorithm.sequence_norm_tokens: absent; loss_aggregation sequence_sum_norm divides by it; "
            f"allowed: a number of tokens, such as rollout.max_response_tokens, {longest}"
        )
    if not summed and algorithm.sequence_norm_tokens is not None:
        yield (
            f"algorithm.sequence_norm_tokens: found {algorithm.sequence_norm_tokens}; loss_aggregation "
            f"{algorithm.loss_aggregation} does not read it; allowed: null"
        )

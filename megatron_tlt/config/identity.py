"""Which keys say what a run is, and which ones may change while it stays the same run.

A run is named by its config and the overrides that identify it. A resume compares the same keys: the others may change.
"""

from __future__ import annotations

from collections.abc import Sequence

MAY_CHANGE = (
    # where it lies
    "run.name",
    "run.dir",
    # how long, how often
    "trainer.steps",
    "trainer.save_every",
    "trainer.async_save",
    "trainer.keep_checkpoints",
    # what is measured and shown
    "evaluation",
    "observe",
    # These decide when idle ranks train the drafter, which changes no distribution: speculation is lossless.
    "spot.min_replicas",
    "spot.min_entries",
    # what the drafter learns from, for the same reason
    "drafter.buffer",
    # limits of time and memory, which change no result
    "launcher.collective_timeout_s",
    "launcher.max_restarts",
    "rewards.workers",
    "rewards.timeout_s",
    "actor.max_tokens_per_micro_batch",
    "model.recipe.supervised.max_tokens_per_micro_batch",
    "rollout.max_prompt_tokens",
    "rollout.filter_overlong_prompts",
    "model.verify",
    # false, or absent
    "actor.megatron.fp16",
    "actor.optimizer.fp16",
    "model.recipe.supervised.optimizer.fp16",
)
"""Keys, and sections with all that is in them."""


def identifies_run(key: str) -> bool:
    """Whether another value of ``key`` (``section.key``) makes another run."""
    return not any(key == allowed or key.startswith(f"{allowed}.") for allowed in MAY_CHANGE)


def identifying(overrides: Sequence[str]) -> list[str]:
    """Those of ``key.path=value`` whose key identifies the run, in their order."""
    return [override for override in overrides if identifies_run(override.partition("=")[0].strip())]

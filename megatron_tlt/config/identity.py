"""The keys that identify a run, and the keys that may change when it is resumed.

A run is named by its config and its identifying overrides. A resume compares the identifying keys only.
"""

from __future__ import annotations

from collections.abc import Sequence

MAY_CHANGE = (
    # location
    "run.name",
    "run.dir",
    # duration and intervals
    "trainer.steps",
    "trainer.save_every",
    "trainer.async_save",
    "trainer.keep_checkpoints",
    # measurements and output
    "evaluation",
    "observe",
    "integrity",
    # Start of drafter training on idle ranks. Speculation is lossless, so no distribution changes.
    "spot.min_replicas",
    "spot.min_entries",
    # training data of the drafter, for the same reason
    "drafter.buffer",
    # a run that a bad gradient stopped continues with a guard
    "guard",
    # time and memory limits, which change no result
    "launcher.collective_timeout_s",
    "launcher.phase_timeout_s",
    "launcher.phase_timeouts_s",
    "launcher.max_restarts",
    "launcher.preload",
    "elastic",
    "speeds",
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
"""Keys, and sections including all their keys."""


def identifies_run(key: str) -> bool:
    """Whether a different value of ``key`` (``section.key``) makes a different run."""
    return not any(key == allowed or key.startswith(f"{allowed}.") for allowed in MAY_CHANGE)


def identifying(overrides: Sequence[str]) -> list[str]:
    """The overrides ``key.path=value`` whose key identifies the run, in order."""
    return [override for override in overrides if identifies_run(override.partition("=")[0].strip())]

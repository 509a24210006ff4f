"""Rules of the rollout engine's model runner and scheduling."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_tlt.config.drafter_kinds import MODEL_FREE
from megatron_tlt.config.schema import TltConfig


def runner_violations(config: TltConfig) -> Iterator[str]:
    """One line for each thing that the model runner, or asynchronous scheduling, cannot do."""
    rollout = config.rollout
    if rollout.model_runner == "v2":
        found = "rollout.model_runner: found v2"
        if rollout.cuda_graphs != "auto":
            yield f"{found}; it captures graphs of its own choice; rollout.cuda_graphs: allowed: auto"
        if rollout.random_numbers == "generator":
            yield f"{found}; it has no generators; rollout.random_numbers: allowed: auto or counter"
    if rollout.async_scheduling:
        yield from _asynchronous(config)


def _asynchronous(config: TltConfig) -> Iterator[str]:
    found, speculation = "rollout.async_scheduling: found true", config.speculation
    if config.rollout.model_runner == "v1":
        yield f"{found}; rollout.model_runner: found v1; allowed: v2"
    if not speculation.enabled:
        return
    head, adaptive = speculation.drafter, speculation.adaptive
    if head in MODEL_FREE:
        yield f"{found}; speculation.drafter {head} needs the tokens of the step before; allowed: a drafter model"
        return
    if adaptive is None:
        return
    if adaptive.lengths is not None:
        yield (
            f"{found}; speculation.adaptive.lengths: found {adaptive.lengths}; all requests have the same number of "
            "drafts; allowed: null"
        )
    plain = {"off", *(f"{head}-{number}" for number in range(1, speculation.num_speculative_tokens + 1))}
    if not adaptive.strategies or not plain.issuperset(adaptive.strategies):
        others = [name for name in adaptive.strategies if name not in plain]
        yield (
            f"{found}; speculation.adaptive.strategies: found {others or 'none, for all of the defaults'}; allowed: a "
            f"list of off and {head}-1 to {head}-{speculation.num_speculative_tokens}"
        )

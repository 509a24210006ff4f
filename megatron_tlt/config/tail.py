"""The section ``tail``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from megatron_tlt.config.section import Section

if TYPE_CHECKING:
    from megatron_tlt.config.schema import TltConfig


class TailConfig(Section):
    """Short rounds ask for more than a step needs and keep what ends first; long rounds decode what they left.

    A short round asks for ``eta_prompts`` times the problems of a step and ``eta_responses`` times the responses to
    each. Keeping the shortest responses to a problem biases the gradient towards short ones, so ``eta_responses`` is
    1 unless you ask for more; then whole problems are put off and none of their responses is chosen.
    """

    eta_prompts: Annotated[float, Field(ge=1, le=4)] = 1.25
    eta_responses: Annotated[float, Field(ge=1, le=4)] = 1.0


def tail_violations(config: TltConfig) -> Iterator[str]:
    """One line for each key that tail batching contradicts."""
    tail = config.tail
    if tail is None:
        return
    if tail.eta_prompts == tail.eta_responses == 1:
        yield "tail: found eta_prompts and eta_responses of 1, with which nothing is left out; allowed: one above 1"
    if config.algorithm.dynamic_sampling.enabled:
        yield "algorithm.dynamic_sampling.enabled: found true; tail chooses the problems of a step; allowed: false"
    if config.trainer.curriculum is not None:
        yield (
            "trainer.curriculum: found a section; it moves, so that a deferred problem would be another one later; "
            "allowed with tail: null"
        )
    if config.observe.recording:
        yield "observe.recording: found true; a short round's aborted responses cannot be replayed; allowed: false"
    for task in config.tasks:
        if task.environment is not None:
            yield f"tasks.environment: {task.name} has one; tail compares responses of one turn; allowed: null"
    engines = config.launcher.world_size // config.rollout.tensor_parallel_size
    if config.run.deterministic and engines > 1:
        yield (
            f"run.deterministic: found true; {engines} engines learn at no fixed step what tail leaves out, and bits "
            "depend on the batch; allowed: false, or one engine"
        )

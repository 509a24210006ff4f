"""The section ``tail``."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, PositiveInt

from megatron_tlt.config.rounding import times_at_least
from megatron_tlt.config.section import Section

if TYPE_CHECKING:
    from megatron_tlt.config.algorithm import AlgorithmConfig
    from megatron_tlt.config.schema import TltConfig


MAX_STALENESS = 8
"""Steps, where ``tail.max_staleness`` is not given."""


class TailConfig(Section):
    """Short rounds ask for more than a step needs and keep what ends first; long rounds decode what they left.

    A short round asks for ``eta_prompts`` times the problems of a step and ``eta_responses`` times the responses to
    each. Keeping the shortest responses to a problem biases the gradient towards short ones, so ``eta_responses`` is
    1 unless you ask for more; then whole problems are put off and none of their responses is chosen.

    Responses ``race`` by their tokens, so that what is kept depends on them alone, or by time, which ends a round
    somewhat earlier where engines are unequally fast.

    ``deferred: resample`` generates the problems of a long round anew, by its policy. ``continue`` keeps what short
    rounds decoded of them: responses that ended, and beginnings of others, which the long round's policy continues.
    A response whose oldest token is more than ``max_staleness`` steps old (8 unless given) is generated anew.
    """

    eta_prompts: Annotated[float, Field(ge=1, le=4)] = 1.25
    eta_responses: Annotated[float, Field(ge=1, le=4)] = 1.0
    race: Literal["tokens", "time"] = "tokens"
    deferred: Literal["resample", "continue"] = "resample"
    max_staleness: PositiveInt | None = None


def tail_violations(config: TltConfig) -> Iterator[str]:
    """One line for each key that tail batching contradicts."""
    tail = config.tail
    if tail is None:
        return
    if tail.eta_prompts == tail.eta_responses == 1:
        yield "tail: found eta_prompts and eta_responses of 1, with which nothing is left out; allowed: one above 1"
    if tail.race == "time" and config.run.deterministic:
        yield "tail.race: found time; what is kept depends on measured times; allowed with run.deterministic: tokens"
    if tail.race == "time" and (size := config.rollout.tensor_parallel_size) > 1:
        found = f"found time; the {size} ranks of an engine measure different ones"
        yield f"tail.race: {found}; allowed with rollout.tensor_parallel_size above 1: tokens"
    if tail.deferred == "continue":
        yield from continue_violations(config, "tail.deferred: found continue")
        yield from _waiting_violations(tail, config.trainer.prompts_per_step)
    elif tail.max_staleness is not None:
        found = f"found {tail.max_staleness}; deferred: resample has tokens of one policy"
        yield f"tail.max_staleness: {found}; allowed: null"
    yield from racing_violations(config, "tail")


def longest_wait(prompts: int, left: int) -> int:
    """Steps that a problem waits for its long round at most, if short rounds leave ``left`` problems each."""
    waiting: deque[int] = deque()
    longest = step = 0
    seen = set[tuple[int, ...]]()
    while (ages := tuple(step - begun for begun in waiting)) not in seen:
        seen.add(ages)
        if len(waiting) >= prompts:
            longest = max(longest, step - waiting[0])
            waiting = deque(list(waiting)[prompts:])
        else:
            waiting.extend([step] * left)
        step += 1
    return longest


def _waiting_violations(tail: TailConfig, prompts: int) -> Iterator[str]:
    left = times_at_least(tail.eta_prompts, prompts) - prompts
    if not left:
        yield (
            f"tail.deferred: found continue; with eta_prompts {tail.eta_prompts:g} a short round asks for no more "
            f"problems than the {prompts} that it trains on, so none is deferred; allowed: a larger eta_prompts"
        )
        return
    steps = longest_wait(prompts, left)
    bound = tail.max_staleness or MAX_STALENESS
    if bound < steps:
        yield (
            f"tail.max_staleness: found {bound}; with eta_prompts {tail.eta_prompts:g} a problem waits up to {steps} "
            f"steps for its long round, and what is older is dropped; allowed with deferred: continue: from {steps} on"
        )


def racing_violations(config: TltConfig, section: str) -> Iterator[str]:
    """What ``section`` (tail or schedule) contradicts, as it ends responses early and chooses problems."""
    if config.algorithm.dynamic_sampling.enabled:
        found = f"found true; {section} chooses the problems of a step"
        yield f"algorithm.dynamic_sampling.enabled: {found}; allowed: false"
    if config.trainer.curriculum is not None:
        yield (
            "trainer.curriculum: found a section; it moves, so that a deferred problem would be another one later; "
            f"allowed with {section}: null"
        )
    if config.observe.recording:
        yield f"observe.recording: found true; with {section} responses are ended early; allowed: false"
    for task in config.tasks:
        if task.environment is not None:
            yield f"tasks.environment: {task.name} has one; {section} compares responses of one turn; allowed: null"
    engines = config.launcher.world_size // config.rollout.tensor_parallel_size
    if config.run.deterministic and engines > 1:
        yield (
            f"run.deterministic: found true; {engines} engines learn at no fixed step what {section} leaves out, and "
            "bits depend on the batch; allowed: false, or one engine"
        )


def continue_violations(config: TltConfig, found: str) -> Iterator[str]:
    """What training on tokens of earlier policies needs; ``found`` names the key and its value."""
    correction = config.algorithm.correction
    if correction.weights == "none" and not correction.bypass:
        yield (
            f"{found}; its responses have tokens of earlier policies, which the loss has to correct for; allowed: with "
            "algorithm.correction.weights: token or sequence, or bypass: true"
        )
    yield from _kl_violations(config.algorithm, found)
    if config.rollout.router_replay != "none":
        replay = f"found {config.rollout.router_replay}, without experts of a response's first tokens"
        yield f"{found}; rollout.router_replay: {replay}; allowed: none"


def _kl_violations(algorithm: AlgorithmConfig, found: str) -> Iterator[str]:
    """A KL term of the loss expects tokens of the trained policy; a correction weights the surrogate alone."""
    if algorithm.name == "distillation":
        name = "found distillation, whose loss is a KL term alone"
        yield f"{found}; algorithm.name: {name}; it is not corrected for tokens of earlier policies; allowed: another"
    elif algorithm.kl.coefficient and algorithm.kl.placement == "loss":
        term = f"found {algorithm.kl.coefficient:g} in the loss"
        yield (
            f"{found}; algorithm.kl.coefficient: {term}, a term that is not corrected for tokens of earlier policies; "
            "allowed: 0, or algorithm.kl.placement: reward"
        )

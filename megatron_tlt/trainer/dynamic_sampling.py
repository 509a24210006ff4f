"""Problems of a step: drawn once, or until enough of them have rewards that differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_tlt.config.algorithm import DynamicSamplingConfig
from megatron_tlt.config.rounding import times_at_least
from megatron_tlt.data.rollout_batch import RolloutBatch
from megatron_tlt.tasks.types import Problem
from megatron_tlt.trainer.experience import Answers, PhaseTimes
from megatron_tlt.trainer.responses import ScoredResponse

Collect = Callable[[list[Problem], int], Answers]
"""Responses to problems, by the number of the generation in the step, from 0."""


@dataclass(frozen=True)
class Collected:
    """The responses that a step trains on, and what it took to get them."""

    problems: list[Problem]
    scored: list[ScoredResponse]
    batch: RolloutBatch
    times: PhaseTimes
    generations: int
    drawn: int
    """Problems drawn, used or not."""
    tokens: int
    """Response tokens decoded, used or not."""


def collect_problems(
    problem: Callable[[int], Problem],
    first: int,
    wanted: int,
    group_size: int,
    settings: DynamicSamplingConfig,
    collect: Collect,
) -> Collected:
    """The responses to ``wanted`` problems, drawn from index ``first`` on.

    With dynamic sampling (DAPO 2503.14476, section 3.2) problems whose responses all have the same reward are dropped,
    and others are drawn in up to ``settings.max_generations`` rollouts. If those do not suffice, the first dropped
    problems fill the batch, so that its size stays the same.
    """
    if not settings.enabled:
        problems = [problem(first + i) for i in range(wanted)]
        scored, batch, times = collect(problems, 0)
        return Collected(problems, scored, batch, times, 1, wanted, sum(s.length for s in scored))
    parts: list[tuple[list[Problem], list[ScoredResponse], RolloutBatch, PhaseTimes]] = []
    mixed: list[tuple[int, int]] = []
    others: list[tuple[int, int]] = []
    drawn = 0
    while len(mixed) < wanted and len(parts) < settings.max_generations:
        count = times_at_least(settings.over_sample, wanted - len(mixed))
        problems = [problem(first + drawn + i) for i in range(count)]
        drawn += count
        parts.append((problems, *collect(problems, len(parts))))
        for at, differs in enumerate(differing_groups(parts[-1][1], group_size)):
            (mixed if differs else others).append((len(parts) - 1, at))
    return _joined(parts, sorted([*mixed, *others[: max(0, wanted - len(mixed))]][:wanted]), group_size, drawn)


def differing_groups(scored: Sequence[ScoredResponse], group_size: int) -> list[bool]:
    """For each group of consecutive responses, whether their rewards differ."""
    rewards = [s.reward.value for s in scored]
    return [len(set(rewards[i : i + group_size])) > 1 for i in range(0, len(rewards), group_size)]


def _joined(
    parts: Sequence[tuple[list[Problem], list[ScoredResponse], RolloutBatch, PhaseTimes]],
    chosen: Sequence[tuple[int, int]],
    group_size: int,
    drawn: int,
) -> Collected:
    """The chosen groups (generation, problem), ascending, as one batch with problems numbered anew."""
    problems: list[Problem] = []
    scored: list[ScoredResponse] = []
    batches: list[RolloutBatch] = []
    for generation, (asked, answers, batch, _) in enumerate(parts):
        mine = [at for number, at in chosen if number == generation]
        samples = [at * group_size + i for at in mine for i in range(group_size)]
        number = {at: len(problems) + i for i, at in enumerate(mine)}
        scored += [answers[i].of_problem(number[answers[i].problem]) for i in samples]
        problems += [asked[at] for at in mine]
        batches.append(batch.select(samples))
    times = [part[3] for part in parts]
    return Collected(
        problems,
        scored,
        RolloutBatch.concatenate(batches),
        PhaseTimes(sum(t.rollout for t in times), sum(t.idle for t in times), sum(t.reward for t in times)),
        generations=len(parts),
        drawn=drawn,
        tokens=sum(s.length for part in parts for s in part[1]),
    )

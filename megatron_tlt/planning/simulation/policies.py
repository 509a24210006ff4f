"""A policy's actions in one step: who speculates, who trains the drafter, which responses are kept."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from megatron_tlt.planning.simulation.acceptance import OFF, Alignment
from megatron_tlt.planning.simulation.lengths import draw
from megatron_tlt.planning.simulation.rollout import Rollout, Speculation, simulate_rollout
from megatron_tlt.planning.simulation.scenario import Scenario

Array = NDArray[np.float64]


@dataclass(frozen=True)
class SchedulingPolicy:
    """``speculation`` is off, static (always the first arm) or adaptive (gate and choice)."""

    name: str
    speculation: str = "off"
    trains_drafter: bool = False
    batches_tails: bool = False


POLICIES = {
    policy.name: policy
    for policy in (
        SchedulingPolicy("off"),
        SchedulingPolicy("static", "static"),
        SchedulingPolicy("adaptive", "adaptive"),
        SchedulingPolicy("spot", "adaptive", trains_drafter=True),
        SchedulingPolicy("tail", batches_tails=True),
        SchedulingPolicy("tail+spot", "adaptive", trains_drafter=True, batches_tails=True),
    )
}
"""The last combines RollPacker and TLT, which is unpublished."""


def speculation_of(scenario: Scenario, policy: SchedulingPolicy, alignment: Alignment) -> Speculation:
    """An engine's speculation under a policy, with the drafter's current alignment."""
    if policy.speculation == "off":
        return Speculation()
    if policy.speculation == "static":
        return Speculation(scenario.arms[:1], (alignment.tokens(scenario.arms[0]),))
    arms, gate = (OFF, *scenario.arms), scenario.gate
    tokens = tuple(alignment.tokens(arm) for arm in arms)
    return Speculation(arms, tokens, gate.threshold, gate.patience, gate.hysteresis, scenario.explore_cost)


@dataclass
class RolloutRound:
    """A rollout and the responses kept from it."""

    rollout: Rollout
    seconds: float
    kept: Array
    """Lengths of the responses used for training, group after group."""
    ends: Array
    """Time at which each engine was free."""
    responses: Array
    """Number of responses that each engine had decoded by then."""


def spread(lengths_PG: Array, engines: int) -> tuple[Array, NDArray[np.intp]]:
    """Distributes groups over engines as evenly as possible: one row per engine, and each response's place in it.

    P prompts, G responses per prompt. Groups are split only if there are fewer groups than engines.
    """
    prompts, group = lengths_PG.shape
    flat = lengths_PG.ravel()
    unit = group if prompts >= engines else 1
    units = len(flat) // unit
    owner = np.repeat(np.arange(units) * min(engines, units) // units, unit)
    counts = np.bincount(owner, minlength=engines)
    first = np.concatenate([[0], np.cumsum(counts)[:-1]])
    column = np.arange(len(flat)) - first[owner]
    lengths_ER = np.zeros((engines, int(counts.max())))
    lengths_ER[owner, column] = flat
    return lengths_ER, owner * lengths_ER.shape[1] + column


@dataclass
class Prompts:
    """Source of prompts: always new ones, and with tail batching also the deferred ones."""

    scenario: Scenario
    rng: np.random.Generator
    deferred: list[float] = field(default_factory=list)
    """The shared part of the lengths of each deferred prompt, as standard normal variables."""

    def plain_round(self, speculation: Speculation, watched: tuple[int, ...] = ()) -> RolloutRound:
        """Decodes every response of every prompt to its end."""
        one = self.scenario
        normal = draw(self.rng, one.prompts, one.group, one.constants.group_correlation)
        lengths = one.lengths.at(normal, one.max_response_tokens)
        rollout, _ = self._decode(lengths, speculation, watched)
        responses = (~np.isnan(rollout.finished_ER)).sum(axis=1).astype(np.float64)
        return RolloutRound(rollout, rollout.seconds_in_all, lengths.ravel(), rollout.ends_E, responses)

    def tail_round(self, speculation: Speculation, watched: tuple[int, ...] = ()) -> RolloutRound:
        """RollPacker: a long round of deferred prompts once they fill one, else a short round.

        A short round launches more prompts and responses than it keeps. It ends when the first ``prompts`` prompts have
        ``group`` responses. Excess responses run until then: no slot is freed earlier.
        """
        one = self.scenario
        shared = np.sqrt(one.constants.group_correlation)
        is_long = len(self.deferred) >= one.prompts
        if is_long:
            common, self.deferred = np.array(self.deferred[: one.prompts]), self.deferred[one.prompts :]
            size = one.group
        else:
            common = self.rng.standard_normal(int(np.ceil(one.tail.prompts * one.prompts)))
            size = int(np.ceil(one.tail.responses * one.group))
        own = self.rng.standard_normal((len(common), size)) * np.sqrt(1.0 - shared**2)
        lengths = one.lengths.at(shared * common[:, None] + own, one.max_response_tokens)
        rollout, place = self._decode(lengths, speculation, watched)
        finished = rollout.finished_ER.ravel()[place].reshape(lengths.shape)
        first = np.argsort(finished, axis=1, kind="stable")[:, : one.group]
        ended = np.take_along_axis(finished, first, axis=1).max(axis=1)
        chosen = np.argsort(ended, kind="stable")[: one.prompts]
        over = float(ended[chosen].max())
        left = np.setdiff1d(np.arange(len(common)), chosen)
        self.deferred += common[left].tolist()
        kept = np.take_along_axis(lengths, first, axis=1)[chosen].ravel()
        responses = (rollout.finished_ER <= over).sum(axis=1).astype(np.float64)
        # an engine is free when the round ends, or earlier if it has no requests left
        return RolloutRound(rollout, over, kept, np.minimum(rollout.ends_E, over), responses)

    def _decode(
        self, lengths: Array, speculation: Speculation, watched: tuple[int, ...]
    ) -> tuple[Rollout, NDArray[np.intp]]:
        one = self.scenario
        lengths_ER, place = spread(lengths, one.engines)
        return simulate_rollout(one.engine(), lengths_ER, one.prompt_tokens, one.limits(), speculation, watched), place

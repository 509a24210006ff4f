"""A policy's actions in one step: who speculates, who trains the drafter, which responses are kept."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_tlt.planning.simulation.acceptance import OFF, Alignment
from megatron_tlt.planning.simulation.lengths import draw
from megatron_tlt.planning.simulation.rollout import Rollout, Speculation, simulate_rollout
from megatron_tlt.planning.simulation.rounds import RacingRounds, RoundKind
from megatron_tlt.planning.simulation.scenario import Scenario

Array = NDArray[np.float64]


@dataclass(frozen=True)
class SchedulingPolicy:
    """``speculation`` is off, static (always the first arm) or adaptive (gate and choice).

    ``rounds``: which responses a step waits for; None: all that it began. ``streams``: idle engines train the policy,
    once the drafter has its steps where they train it too.
    """

    name: str
    speculation: str = "off"
    trains_drafter: bool = False
    rounds: RoundKind | None = None
    streams: bool = False

    @property
    def is_synchronous(self) -> bool:
        """Whether a step trains on all responses to its problems, which its own policy sampled."""
        return self.rounds is None


POLICIES = {
    policy.name: policy
    for policy in (
        SchedulingPolicy("off"),
        SchedulingPolicy("static", "static"),
        SchedulingPolicy("adaptive", "adaptive"),
        SchedulingPolicy("spot", "adaptive", trains_drafter=True),
        SchedulingPolicy("stream", streams=True),
        SchedulingPolicy("stream+spot", "adaptive", trains_drafter=True, streams=True),
        SchedulingPolicy("tail", rounds="tail"),
        SchedulingPolicy("continue", rounds="continue"),
        SchedulingPolicy("partial", rounds="partial"),
        SchedulingPolicy("one_step_off", rounds="one_step_off"),
        SchedulingPolicy("tail+stream", rounds="tail", streams=True),
        SchedulingPolicy("tail+spot", "adaptive", trains_drafter=True, rounds="tail"),
        SchedulingPolicy("continue+spot", "adaptive", trains_drafter=True, rounds="continue"),
        SchedulingPolicy("partial+spot", "adaptive", trains_drafter=True, rounds="partial"),
        SchedulingPolicy("one_step_off+spot", "adaptive", trains_drafter=True, rounds="one_step_off"),
    )
}
"""Those with a plus combine mechanisms of RollPacker, or bounded asynchrony, with TLT, or two of RollPacker; these
figures are unpublished."""


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
    streamable: Array | None
    """``kept`` in the order of the engines; None where a race decides at the end what is kept."""


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
    """Source of prompts, with the rounds that decode them."""

    scenario: Scenario
    rng: np.random.Generator
    kind: RoundKind | None = None

    def __post_init__(self) -> None:
        self.racing = None if self.kind is None else RacingRounds(self.scenario, self.kind, self.rng)

    def round(self, speculation: Speculation, watched: tuple[int, ...] = ()) -> RolloutRound:
        """The next step's rollout."""
        if self.racing is None:
            return self._plain_round(speculation, watched)
        one, engines = self.racing.next(), self.scenario.engines
        # dealt in turn, as those that must win come first in a round
        dealt = np.concatenate([np.arange(at, len(one.reached), engines) for at in range(engines)])
        rollout, place = self._decode(one.reached[dealt], speculation, watched, one.decoded[dealt])
        ended = np.zeros(rollout.finished_ER.size)
        ended[place] = one.ended[dealt].ravel()
        responses = ended.reshape(rollout.finished_ER.shape).sum(axis=1)
        streamable = one.reached[dealt].ravel() if one.is_long else None
        return RolloutRound(rollout, rollout.seconds_in_all, one.kept, rollout.ends_E, responses, streamable)

    def _plain_round(self, speculation: Speculation, watched: tuple[int, ...]) -> RolloutRound:
        """Decodes every response of every prompt to its end."""
        one = self.scenario
        normal = draw(self.rng, one.prompts, one.group, one.constants.group_correlation)
        lengths = one.lengths.at(normal, one.max_response_tokens)
        rollout, _ = self._decode(lengths, speculation, watched)
        responses = (~np.isnan(rollout.finished_ER)).sum(axis=1).astype(np.float64)
        kept = lengths.ravel()
        return RolloutRound(rollout, rollout.seconds_in_all, kept, rollout.ends_E, responses, kept)

    def _decode(
        self, lengths: Array, speculation: Speculation, watched: tuple[int, ...], decoded: Array | None = None
    ) -> tuple[Rollout, NDArray[np.intp]]:
        one = self.scenario
        lengths_ER, place = spread(lengths, one.engines)
        left_ER = lengths_ER.copy()
        if decoded is not None:
            left_ER.reshape(-1)[place] = decoded.ravel()
        rollout = simulate_rollout(
            one.engine(), lengths_ER, one.prompt_tokens, one.limits(), speculation, watched, left_ER
        )
        return rollout, place

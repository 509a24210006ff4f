"""Whole RL steps under each policy, and their summary."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp
from statistics import fmean
from typing import Any

import numpy as np

from megatron_tlt.planning.saturation import MOST_ACCEPTANCES, is_saturated
from megatron_tlt.planning.simulation.acceptance import Alignment
from megatron_tlt.planning.simulation.phases import (
    bubble_steps,
    drafter_done_at,
    drafter_step_flops,
    reshard_seconds,
    streamed_responses,
    training_seconds,
)
from megatron_tlt.planning.simulation.policies import POLICIES, Prompts, RolloutRound, SchedulingPolicy, speculation_of
from megatron_tlt.planning.simulation.scenario import Scenario

PHASES = ("rollout", "log_probs", "update", "drafter", "reshard")
WATCHED = 8
"""Engines whose running batch is recorded in the first step of the first seed."""


@dataclass(frozen=True)
class Step:
    """One step of one policy."""

    seconds: Mapping[str, float]
    """By phase."""
    idle: float
    """Mean fraction of the rollout that an engine waits for the last one."""
    tokens_per_round: float
    """Tokens per request and engine step."""
    drafter_steps: float
    """Optimizer steps of the drafter in the bubble."""
    streamed: float
    """Fraction of the step's tokens whose gradient was accumulated in the bubble."""
    alignment: float
    """Alignment of the drafter at the start of the rollout."""
    lengths_mean: float
    lengths_longest: float
    speculating: float
    """Fraction of the engines' decoding time."""
    preemptions: int

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


@dataclass
class Outcome:
    """One policy over seeds: ``steps[seed]`` are consecutive."""

    policy: SchedulingPolicy
    steps: list[list[Step]] = field(default_factory=list)
    running: list[list[tuple[float, int]]] = field(default_factory=list)

    def mean(self, name: str) -> float:
        return fmean(float(getattr(step, name)) for steps in self.steps for step in steps)

    def phase(self, name: str) -> float:
        return fmean(step.seconds[name] for steps in self.steps for step in steps)

    def totals(self) -> list[float]:
        """Mean seconds of a step, for each seed."""
        return [fmean(step.total for step in steps) for steps in self.steps]


def simulate_policy(
    scenario: Scenario, policy: SchedulingPolicy, seeds: Sequence[int], steps: int, watch: bool = False
) -> Outcome:
    """Simulates ``steps`` steps of each seed.

    A trained drafter starts at its equilibrium: training in a step compensates the loss by a policy update, for the
    bubble of a first step that is not counted. An untrained drafter stays cold. Where the bubble may also be streamed
    in, it is the drafter's whenever its drafts are worse than they were, by the rule of ``trainer.bubble``. The same
    seed gives the same responses to every synchronous policy.
    """
    outcome = Outcome(policy)
    for seed in seeds:
        alignment = Alignment(scenario.constants)
        if policy.trains_drafter:
            trial = _step(scenario, policy, _prompts(scenario, policy, seed), alignment, ())[0]
            alignment.level = _settled(scenario, max(trial.drafter_steps, scenario.spot.min_steps))
        prompts, own, accepted = _prompts(scenario, policy, seed), [], deque[float](maxlen=MOST_ACCEPTANCES)
        for number in range(steps):
            watched = watch and seed == seeds[0] and number == 0
            if policy.trains_drafter:
                accepted.append(alignment.tokens(scenario.arms[0]))
            good = policy.trains_drafter and is_saturated(accepted[-1], max(accepted))
            engines = tuple(range(min(WATCHED, scenario.engines))) if watched else ()
            step, last = _step(scenario, policy, prompts, alignment, engines, good)
            own.append(step)
            if watched:
                end = last.seconds
                outcome.running = [[*(at for at in row if at[0] < end), (end, 0)] for row in last.rollout.running]
            if policy.trains_drafter:
                alignment.trained(max(step.drafter_steps, scenario.spot.min_steps))
                alignment.updated()
        outcome.steps.append(own)
    return outcome


def _prompts(scenario: Scenario, policy: SchedulingPolicy, seed: int) -> Prompts:
    return Prompts(scenario, np.random.default_rng(seed), policy.rounds)


def _settled(scenario: Scenario, steps: float) -> float:
    """The alignment at which a training step and an update cancel."""
    gain = 1.0 - exp(-steps / scenario.constants.drafter_steps_to_align)
    keep = exp(-1.0 / scenario.constants.updates_to_drift)
    return gain * keep / (1.0 - (1.0 - gain) * keep)


def _step(
    scenario: Scenario,
    policy: SchedulingPolicy,
    prompts: Prompts,
    alignment: Alignment,
    watched: tuple[int, ...],
    is_drafter_good: bool = False,
) -> tuple[Step, RolloutRound]:
    speculation = speculation_of(scenario, policy, alignment)
    one = prompts.round(speculation, watched)
    rollout, mean = one.rollout, float(one.kept.mean())
    trained = bubble_steps(scenario, one.ends, one.responses, mean) if policy.trains_drafter else 0.0
    missing = max(0.0, scenario.spot.min_steps - trained) if policy.trains_drafter else 0.0
    rate = scenario.devices * scenario.device.flops * scenario.constants.training_efficiency
    kept, late, streamed = one.kept, 0.0, np.zeros(len(one.kept), bool)
    if policy.streams and one.streamable is not None and (is_drafter_good or not policy.trains_drafter):
        kept, begin = one.streamable, 0.0
        if policy.trains_drafter:
            begin = drafter_done_at(scenario, one.ends, one.responses, mean)
        streamed, late = streamed_responses(scenario, one.ends, kept, begin)
        if streamed.any():
            trained = min(trained, float(scenario.spot.min_steps))
    seconds = {
        "rollout": one.seconds + late,
        **training_seconds(scenario, kept[~streamed]),
        "drafter": missing * drafter_step_flops(scenario, mean) / rate,
        "reshard": reshard_seconds(scenario),
    }
    decoding = sum(spent for name, spent in rollout.seconds.items() if name != "prefill")
    step = Step(
        seconds=seconds,
        # a rollout may have nothing left to decode: one_step_off began its problems in the step before
        idle=float((one.seconds - one.ends).mean() / one.seconds) if one.seconds else 0.0,
        tokens_per_round=_tokens_per_round(rollout.seconds, scenario, alignment),
        drafter_steps=trained,
        streamed=float(kept[streamed].sum() / kept.sum()),
        alignment=alignment.level,
        lengths_mean=mean,
        lengths_longest=float(one.kept.max()),
        speculating=1.0 - rollout.seconds.get("off", 0.0) / decoding if decoding else 0.0,
        preemptions=rollout.preemptions,
    )
    return step, one


def _tokens_per_round(seconds: Mapping[str, float], scenario: Scenario, alignment: Alignment) -> float:
    """Mean over the time that engines speculate; 1 if they do not."""
    spent = {arm: seconds.get(arm.name, 0.0) for arm in scenario.arms}
    total = sum(spent.values())
    return sum(alignment.tokens(arm) * time for arm, time in spent.items()) / total if total else 1.0


def simulate(
    scenario: Scenario, policies: Iterable[str], seeds: Sequence[int], steps: int, watch: bool = False
) -> dict[str, Outcome]:
    """Simulates every policy by name; see ``simulate_policy``.

    Raises:
        ConfigError: the cluster cannot run the scenario.
    """
    scenario.check()
    return {name: simulate_policy(scenario, POLICIES[name], seeds, steps, watch) for name in policies}


def speedup(outcomes: Mapping[str, Outcome], name: str, over: str = "off") -> dict[str, float]:
    """Ratio of mean step times over all seeds, with the minimum and maximum of single seeds."""
    base, own = outcomes[over].totals(), outcomes[name].totals()
    pairs = [a / b for a, b in zip(base, own, strict=True)]
    ratio = fmean(base) / fmean(own)
    return {"ratio": ratio, "low": min([ratio, *pairs]), "high": max([ratio, *pairs])}


def summarize(outcomes: Mapping[str, Outcome]) -> list[dict[str, Any]]:
    """One row of plain numbers per policy."""
    full = outcomes["off"].mean("lengths_mean") if "off" in outcomes else None
    return [
        {
            "policy": name,
            "step_s": fmean(outcome.totals()),
            **{f"{phase}_s": outcome.phase(phase) for phase in PHASES},
            "idle": outcome.mean("idle"),
            "speculating": outcome.mean("speculating"),
            "tokens_per_round": outcome.mean("tokens_per_round"),
            "drafter_steps": outcome.mean("drafter_steps"),
            "streamed": outcome.mean("streamed"),
            "drafter_alignment": outcome.mean("alignment"),
            "kept_length_mean": outcome.mean("lengths_mean"),
            "full_length_mean": full,
            "kept_length_longest": outcome.mean("lengths_longest"),
            "preemptions": outcome.mean("preemptions"),
            "speedup": speedup(outcomes, name) if "off" in outcomes else None,
        }
        for name, outcome in outcomes.items()
    ]

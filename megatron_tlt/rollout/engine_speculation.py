"""Speculation of one engine across rollouts: selects the strategy of each step and counts the results."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_tlt.config.speculation import SpeculationConfig
from megatron_tlt.platform.device import show
from megatron_tlt.rollout.types import Request, Response
from megatron_tlt.speculation.controller import SpeculationController
from megatron_tlt.speculation.gain import GainMeter, RolloutGain, slowest
from megatron_tlt.speculation.length import LengthPolicy
from megatron_tlt.speculation.plain_times import PlainStepProbe
from megatron_tlt.speculation.strategy import OFF, StepRecord, Strategy


@dataclass
class RolloutAccount:
    """Counts of one engine in one rollout.

    Attributes:
        steps: engine steps by name of the strategy whose drafts they verified.
        open_steps: steps in which a strategy other than "off" could be chosen; None without adaptive speculation.
        drafts: number of verifications of a request's drafts, by ``Strategy.source``.
        accepted: accepted draft tokens, by ``Strategy.source``.
        withheld: drafters that were not allowed to draft.
        gain: rollout time with and without speculation.
        switches: number of strategy changes.
        choosing_s: seconds spent choosing the strategy in steps that changed it.
        catch_up_s: seconds in which the head computed skipped tokens; on a GPU only the launch time.
    """

    steps: dict[str, int] = field(default_factory=dict)
    open_steps: int | None = None
    drafts: dict[str, int] = field(default_factory=dict)
    accepted: dict[str, int] = field(default_factory=dict)
    withheld: list[str] = field(default_factory=list)
    gain: RolloutGain = field(default_factory=lambda: RolloutGain(0.0, 0.0, 0.0))
    switches: int = 0
    choosing_s: float = 0.0
    catch_up_s: float = 0.0


class EngineSpeculation:
    """A ``StrategyChooser`` for all rollouts of one engine, called on the engine's first rank.

    A drafter initialized from the target (no ``drafter.path``) does not draft at version 0, in training or
    evaluation, because it is untrained.

    The gain is estimated from steps without drafts (``GainMeter``); ``PlainStepProbe`` inserts a few such steps.
    Evaluations do not change which training steps are probes, since a resumed run may run more or fewer of them.

    Args:
        speculation: the section; it is enabled.
        adaptive: chooses the strategy; None: always the section's own strategy.
        needs_training: the drafter model starts from the target.
        probe_share: maximum share of speculative steps that run without drafts as probes.
    """

    def __init__(
        self,
        speculation: SpeculationConfig,
        adaptive: SpeculationController | None,
        *,
        needs_training: bool = False,
        probe_share: float = 0.01,
    ) -> None:
        self.adaptive = adaptive
        self._drafter = speculation.drafter
        self._static = Strategy(speculation.drafter, speculation.num_speculative_tokens)
        self._needs_training = needs_training
        self._notified = False
        self._withheld: frozenset[str] = frozenset()
        self._steps: Counter[str] = Counter()
        self._drafts: Counter[str] = Counter()
        self._accepted: Counter[str] = Counter()
        self._open_steps = 0
        self._begin_switches()
        self._probe_share = probe_share
        self._meter, self._probe = GainMeter(), PlainStepProbe(probe_share)
        self._probing = self._probe
        self._gain = RolloutGain(0.0, 0.0, 0.0)
        self._lengths: dict[str, int] = {}
        self._trains = False
        self._kept = self._probe.state()

    def begin_step(self) -> None:
        """Mark the next rollout as a training rollout."""
        self._trains = True

    def begin_rollout(self, requests: Sequence[Request], drafter_version: int | None = None) -> None:
        """Prepare for decoding these requests; ``drafter_version`` is None without a drafter model."""
        untrained = self._needs_training and drafter_version == 0
        self._withheld = frozenset({self._drafter}) if untrained else frozenset()
        if untrained and not self._notified:
            self._notified = True
            show(
                f"note: the {self._drafter} drafter starts from the target and is untrained; rollouts use it "
                "after its first training. A trained drafter (drafter.path) is used from the start"
            )
        for counts in (self._steps, self._drafts, self._accepted):
            counts.clear()
        self._open_steps = 0
        self._begin_switches()
        self._meter.begin_rollout()
        self._lengths.clear()
        self._probing = self._probe if self._trains else PlainStepProbe(self._probe_share)
        self._probing.begin_rollout()
        self._trains = False
        if self.adaptive is not None:
            self.adaptive.tuner.withhold(self._withheld)
            self.adaptive.begin_rollout({one.request_id: (one.problem_key, one.begun) for one in requests})

    def started(self, requests: Sequence[Request]) -> None:
        """Account for requests that begin during the rollout."""
        if self._length_policy is not None:
            for request in requests:
                self._length_policy.start(request.request_id, request.problem_key)

    def _begin_switches(self) -> None:
        self._strategy: Strategy | None = None
        self._switches, self._choosing_s, self._catch_up_s = 0, 0.0, 0.0

    def next(self, batch: int, requests: Mapping[str, int]) -> tuple[Strategy, Mapping[str, int] | None]:
        """See ``StrategyChooser.next``."""
        began = time.perf_counter()
        strategy, budgets = chosen, _ = self._choose(batch, requests)
        if strategy != OFF and self._probing.next(max(batch, 1)):
            strategy, budgets = OFF, None
            if self.adaptive is not None:
                self.adaptive.make_plain()
        seconds = time.perf_counter() - began
        self._meter.used(seconds)
        if self._strategy not in (None, chosen):  # a probe step is not a switch
            self._switches += 1
            self._choosing_s += seconds
        self._strategy = chosen
        return strategy, budgets

    def _choose(self, batch: int, requests: Mapping[str, int]) -> tuple[Strategy, Mapping[str, int] | None]:
        if self.adaptive is None:
            return (OFF if self._drafter in self._withheld else self._static), None
        chosen = self.adaptive.next(batch, requests)
        self._open_steps += self.adaptive.gate.is_open
        return chosen

    def observe(self, step: StepRecord) -> None:
        """See ``StrategyChooser.observe``."""
        began = time.perf_counter()
        self._steps[step.strategy.name] += 1
        self._catch_up_s += step.catch_up_s
        if step.num_drafts:
            self._drafts[step.strategy.source] += step.num_drafts
            self._accepted[step.strategy.source] += step.num_accepted_tokens
        if self._meter.observe(step):
            self._probing.measured(step.batch)
        if self.adaptive is not None:
            self.adaptive.observe(step)
        self._meter.used(time.perf_counter() - began)

    def finished(self, response: Response, length: int | None = None, *, goes_on: bool = False) -> None:
        """Account for a response that finished or was aborted.

        Args:
            response: with the tokens of this rollout.
            length: with those of earlier rollouts.
            goes_on: if it was aborted, a later rollout may continue it, and its length is learned then.
        """
        self._lengths[response.request_id] = len(response.token_ids)
        lengths, draft = self._length_policy, response.draft
        whole = len(response.token_ids) if length is None else length
        if lengths is not None and response.finish_reason == "abort":
            if goes_on:
                lengths.drop(response.request_id)
            else:
                lengths.abort(response.request_id, whole)
        elif lengths is not None:
            lengths.finish(response.request_id, whole, draft.num_draft_tokens, draft.num_accepted_tokens)

    def end_rollout(self, requests: Sequence[Request]) -> None:
        """Estimate the gain of the rollout and drop its unfinished requests."""
        self._gain = self._meter.end_rollout([self._lengths.get(request.request_id, 0) for request in requests])
        if self._length_policy is not None:
            for request in requests:
                self._length_policy.drop(request.request_id)

    @property
    def _length_policy(self) -> LengthPolicy | None:
        return None if self.adaptive is None else self.adaptive.lengths

    @property
    def account(self) -> RolloutAccount:
        """Counts of the last rollout."""
        return RolloutAccount(
            dict(self._steps),
            None if self.adaptive is None else self._open_steps,
            dict(self._drafts),
            dict(self._accepted),
            sorted(self._withheld),
            self._gain,
            self._switches,
            self._choosing_s,
            self._catch_up_s,
        )

    def keep_rollout(self) -> None:
        """Commit the probe schedule once all engines finished; an interrupted rollout repeats the same probes."""
        self._kept = self._probe.state()

    def state(self) -> dict[str, Any]:
        """Measurements as JSON, without the state of ``adaptive``."""
        return {"plain": self._meter.plain.state(), "probe": self._kept}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the result of ``state()``."""
        self._meter.plain.load_state(state["plain"])
        self._probe.load_state(state["probe"])
        self._kept = self._probe.state()


def account_metrics(accounts: Sequence[RolloutAccount]) -> dict[str, float]:
    """Metrics of a rollout over all engines.

    ``share_*``: share of engine steps by strategy. ``gate_open``: share of steps that could speculate.
    ``acceptance_length_*``: tokens per verification of a request's drafts, the target's own included, by source.
    ``drafter_withheld``: 1 if a drafter was withheld. ``switches``: strategy changes per engine; ``switch_ms``: time to
    choose the strategy per change. ``catch_up_ms``: time per engine and rollout in which the head computes skipped
    tokens. ``gain``, of the rollout and of each engine, where enough was measured, with the two times whose ratio it
    is, and ``gain_coverage``.
    """
    steps, drafts, accepted = Counter[str](), Counter[str](), Counter[str]()
    for account in accounts:
        steps.update(account.steps)
        drafts.update(account.drafts)
        accepted.update(account.accepted)
    total = steps.total()
    metrics = {f"speculation/share_{name}": count / total for name, count in steps.items()}
    opened = [account.open_steps for account in accounts if account.open_steps is not None]
    if opened and total:
        metrics["speculation/gate_open"] = sum(opened) / total
    switches = sum(account.switches for account in accounts)
    if switches:
        metrics["speculation/switches"] = switches / len(accounts)
        metrics["speculation/switch_ms"] = 1e3 * sum(account.choosing_s for account in accounts) / switches
    if catch_up_s := sum(account.catch_up_s for account in accounts):
        metrics["speculation/catch_up_ms"] = 1e3 * catch_up_s / len(accounts)
    for source, count in drafts.items():
        metrics[f"speculation/acceptance_length_{source}"] = 1.0 + accepted[source] / count
    if any(account.withheld for account in accounts):
        metrics["speculation/drafter_withheld"] = 1.0
    return metrics | _gain_metrics([account.gain for account in accounts])


def _gain_metrics(engines: Sequence[RolloutGain]) -> dict[str, float]:
    whole = slowest([one for one in engines if one.seconds > 0])
    if whole is None:
        return {}
    metrics = {"speculation/gain_coverage": whole.coverage, "speculation/rollout_s": whole.seconds}
    if whole.gain is not None:
        metrics |= {"speculation/gain": whole.gain, "speculation/plain_rollout_s": whole.plain_seconds}
    if len(engines) > 1:
        gains = {f"speculation/gain_engine_{index}": one.gain for index, one in enumerate(engines)}
        metrics |= {name: gain for name, gain in gains.items() if gain is not None}
    return metrics

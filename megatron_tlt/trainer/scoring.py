"""Phase 3 of a step: log-probs, corrections and advantages, which the loss reads, of a batch or of a part of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_tlt.actor.policy import Policy
from megatron_tlt.actor.scores import PolicyScores, of_all_samples
from megatron_tlt.algorithms.algorithm import Algorithm
from megatron_tlt.algorithms.correction import correct, correction_metrics
from megatron_tlt.algorithms.kl import kl_per_sample
from megatron_tlt.algorithms.mismatch import Mismatch, enforce, mismatch_per_sample
from megatron_tlt.algorithms.overlong import penalized, without_truncated
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.data.exchange import redistribute
from megatron_tlt.data.rollout_batch import RolloutBatch
from megatron_tlt.platform.collectives import failing_together
from megatron_tlt.trainer.carried import Key
from megatron_tlt.trainer.drafter_manager import OnlineDrafter
from megatron_tlt.trainer.reference import ReferencePolicy
from megatron_tlt.trainer.responses import ScoredResponse
from megatron_tlt.trainer.streamed import Streamed
from megatron_tlt.trainer.task_metrics import advantage_metrics, entropy_metrics

Scores = tuple[PolicyScores | None, dict[int, torch.Tensor]]
"""Of a batch's samples: old log-probs, None where nothing reads them, and hidden states for the drafter."""


class BatchScorer:
    """Adds the columns that the loss reads.

    Args:
        config: of the run.
        policy: gives the old log-probs, unless ``algorithm.correction.bypass`` takes the engine's.
        reference: the policy of the KL penalty; None without one.
        drafter: gets the hidden states of the pass, if any.
        algorithm: assigns credit.
        temperature: of the log-probs.
    """

    def __init__(
        self,
        config: TltConfig,
        policy: Policy,
        reference: ReferencePolicy | None,
        drafter: OnlineDrafter | None,
        algorithm: Algorithm,
        temperature: float,
    ) -> None:
        self._config, self._settings = config, config.algorithm
        self._policy, self._reference, self._drafter = policy, reference, drafter
        self._algorithm, self._temperature = algorithm, temperature

    @property
    def passes(self) -> int:
        """Forward passes over each sample."""
        return int(self._drafter is not None or not self._settings.correction.bypass) + int(self._reference is not None)

    def rest(
        self, scored: Sequence[ScoredResponse], batch: RolloutBatch, streamed: Streamed | None
    ) -> tuple[list[int], list[int]]:
        """The samples that no rank has streamed, and this rank's share of them, ascending both.

        A collective over the world where ``streamed`` is given, as on all ranks or on none.
        """
        early = set[int]() if streamed is None else streamed.of_all_ranks(_places(scored))
        rest = [i for i in range(batch.num_samples) if i not in early]
        return rest, [rest[i] for i in self._policy.share([batch.lengths[i] for i in rest])]

    def score(
        self,
        step: int,
        scored: Sequence[ScoredResponse],
        batch: RolloutBatch,
        rest: Sequence[int],
        share: Sequence[int],
        tasks: Sequence[str],
        metrics: dict[str, float],
        streamed: Streamed | None = None,
    ) -> RolloutBatch:
        """The ``rest`` of a batch, with this rank's ``share`` held; a collective over the world.

        Args:
            step: from 0.
            scored: all responses of the step.
            batch: of their tokens, which may lie on any rank.
            rest: the samples that the update trains on, as :meth:`rest` gives them.
            share: those of them that this rank scores.
            tasks: the task of each response.
            metrics: gets those of the step.
            streamed: what this rank has accumulated already; None: no rank has.

        Raises:
            RunError: on every rank: the difference between engine and actor exceeds the configured threshold, or a
                streamed sample had another advantage than it has now.
        """
        settings, lengths, places = self._settings, [one.length for one in scored], _places(scored)
        mine = {places[key]: key for key in streamed.keys} if streamed is not None else {}
        batch = redistribute(self._masked(scored, batch), [*share, *mine])
        old, states = self._scores(batch.select(rest), alone=False)
        states = {rest[i]: hidden for i, hidden in states.items()}
        if streamed is not None:
            old = streamed.merged(old, batch, rest, mine)
            states |= {places[key]: hidden for key, hidden in streamed.states.items()}
        if self._drafter is not None:
            self._drafter.add(step, scored, batch, states)
        if old is not None:
            batch = batch.with_columns(old_log_probs_G=old.log_probs_G)
            batch = self._compare_with_rollout(step, batch, old, tasks, metrics)
        if settings.correction.bypass:
            batch = batch.with_columns(old_log_probs_G=batch.rollout_log_probs_G)
        if self._reference:
            reference = self._reference.log_probs(batch, self._temperature)
            batch = batch.with_columns(reference_log_probs_G=reference.log_probs_G)
        rewards = self._rewards(scored)
        if settings.kl.coefficient and settings.kl.placement == "reward":
            rewards = self._less_divergence(rewards, batch, metrics)
        advantages = self._algorithm.assign_credit(rewards, lengths)
        metrics.update(advantage_metrics(advantages, lengths))
        if streamed is not None:
            with failing_together():
                streamed.check(settings.name, {key: advantages[i] for i, key in mine.items()})
            metrics["stream/share"] = 1 - sum(batch.lengths[i] for i in rest) / sum(batch.lengths)
        return _with_advantages(batch, advantages).select(rest)

    def prepare_parts(self) -> None:
        """What :meth:`score_part` needs to know of other ranks; a collective over the world."""
        if self._drafter is not None:
            self._policy.state_holders(self._drafter.aux_layers)

    def advantages(self, scored: Sequence[ScoredResponse]) -> list[float]:
        """Of whole problems, for algorithms that are ``per_problem``; without a KL penalty.

        Raises:
            RunError: a reward or an advantage is not finite.
        """
        return self._algorithm.assign_credit(self._rewards(scored), [one.length for one in scored])

    def score_part(
        self, scored: Sequence[ScoredResponse], batch: RolloutBatch, advantages: Sequence[float]
    ) -> tuple[RolloutBatch, Scores]:
        """As :meth:`score`, for some responses with their advantages, all held, without a reference.

        The ranks of one data-parallel rank call it.
        """
        batch = self._masked(scored, batch)
        old, states = self._scores(batch, alone=True)
        if old is not None:
            batch = batch.with_columns(old_log_probs_G=old.log_probs_G)
            if self._settings.correction.compares:
                batch, _ = correct(batch, self._settings.correction)
        if self._settings.correction.bypass:
            batch = batch.with_columns(old_log_probs_G=batch.rollout_log_probs_G)
        return _with_advantages(batch, advantages), (old, states)

    def _masked(self, scored: Sequence[ScoredResponse], batch: RolloutBatch) -> RolloutBatch:
        if not self._settings.overlong.filter:
            return batch
        return without_truncated(batch, [one.finish_reason == "length" for one in scored])

    def _scores(self, batch: RolloutBatch, *, alone: bool) -> Scores:
        if self._drafter is None:
            if self._settings.correction.bypass:
                return None, {}
            return self._policy.log_probs(batch, self._temperature, alone=alone), {}
        layers = self._drafter.aux_layers
        return self._policy.log_probs_and_states(batch, self._temperature, aux_layers=layers, alone=alone)

    def _rewards(self, scored: Sequence[ScoredResponse]) -> list[float]:
        rewards, overlong = [one.reward.value for one in scored], self._settings.overlong
        if not overlong.penalty:
            return rewards
        limit = self._config.rollout.max_response_tokens
        return penalized(rewards, [one.length for one in scored], limit, overlong)

    def _less_divergence(self, rewards: Sequence[float], batch: RolloutBatch, metrics: dict[str, float]) -> list[float]:
        """Rewards minus the coefficient times the KL estimate, in nats, summed over each response."""
        kl = self._settings.kl
        sums_N = of_all_samples(kl_per_sample(batch, kl.estimator), batch.held, batch.num_samples)[:, 0]
        metrics["reward/kl"] = float(sums_N.mean())
        return [reward - kl.coefficient * float(penalty) for reward, penalty in zip(rewards, sums_N, strict=True)]

    def _compare_with_rollout(
        self, step: int, batch: RolloutBatch, old: PolicyScores, tasks: Sequence[str], metrics: dict[str, float]
    ) -> RolloutBatch:
        """Records the difference of the engine's log-probs, and corrects for it if configured.

        Raises:
            RunError: on every rank, if the difference exceeds the configured threshold.
        """
        columns = [mismatch_per_sample(batch), old.entropy_sums_H[:, None]]
        if batch.versions_G is not None:
            columns.append(mismatch_per_sample(batch, stale=True))
        rows_NK = of_all_samples(torch.cat(columns, dim=1), batch.held, batch.num_samples)
        mismatch = Mismatch.of(rows_NK[:, :4])
        metrics["mismatch/mean_abs"] = mismatch.mean_abs
        metrics["mismatch/max_abs"] = mismatch.max_abs
        metrics["mismatch/k3_kl"] = mismatch.k3_kl
        tokens_N = rows_NK[:, 3]
        if batch.versions_G is not None:
            metrics["mismatch/stale_k3_kl"] = Mismatch.of(rows_NK[:, 5:]).k3_kl
            tokens_N = tokens_N + rows_NK[:, 8]
        metrics.update(entropy_metrics(tasks, rows_NK[:, 4].tolist(), tokens_N.tolist()))
        enforce(mismatch, self._settings.mismatch, step)
        correction = self._settings.correction
        if correction.compares:
            batch, sums_H5 = correct(batch, correction)
            metrics |= correction_metrics(of_all_samples(sums_H5, batch.held, batch.num_samples))
        return batch


def _places(scored: Sequence[ScoredResponse]) -> dict[Key, int]:
    return {(one.problem, one.sample): i for i, one in enumerate(scored)}


def _with_advantages(batch: RolloutBatch, advantages: Sequence[float]) -> RolloutBatch:
    """The batch with its advantages, without the columns that the loss does not read."""
    advantages_N = torch.tensor(advantages, dtype=torch.float64)
    return batch.with_columns(advantages_N=advantages_N, rollout_log_probs_G=None, versions_G=None)

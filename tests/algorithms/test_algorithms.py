"""Credit assignment, losses and mismatch on plain tensors."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_tlt.algorithms.advantages import group_relative_advantages, mixed_groups
from megatron_tlt.algorithms.clipped import ClippedPolicyLoss
from megatron_tlt.algorithms.kl import k3_estimate, kl_per_sample
from megatron_tlt.algorithms.losses import LossInputs, negative_log_likelihood
from megatron_tlt.algorithms.mismatch import Mismatch, enforce, mismatch_per_sample
from megatron_tlt.config.algorithm import AlgorithmConfig, KlConfig, MismatchConfig
from megatron_tlt.data.rollout_batch import RolloutBatch
from megatron_tlt.errors import RunError


@given(st.lists(st.floats(-5, 5), min_size=4, max_size=4), st.floats(-3, 3))
def test_advantages_ignore_a_common_shift_and_sum_to_zero(rewards: list[float], shift: float) -> None:
    plain = group_relative_advantages(rewards, 4, normalize_by_std=False)
    shifted = group_relative_advantages([r + shift for r in rewards], 4, normalize_by_std=False)
    assert sum(plain) == pytest.approx(0.0, abs=1e-9)
    assert plain == pytest.approx(shifted, abs=1e-9)


def test_advantages_compare_within_the_group_only() -> None:
    advantages = group_relative_advantages([1, 0, 0, 1, 1, 1, 1, 1], 4, normalize_by_std=True)
    assert advantages[:4] == pytest.approx([1, -1, -1, 1], abs=1e-4)
    assert advantages[4:] == [0, 0, 0, 0]
    # the mean of three times 0.1 is not 0.1
    assert group_relative_advantages([0.1, 0.1, 0.1], 3, normalize_by_std=True) == [0, 0, 0]
    with pytest.raises(RunError, match="response 5: reward nan"):
        group_relative_advantages([1, 0, 0, 1, 1, math.nan], 2, normalize_by_std=False)
    with pytest.raises(ValueError, match="5 rewards"):
        group_relative_advantages([1, 2, 3, 4, 5], 4, normalize_by_std=False)


def inputs(advantages: list[float], old: torch.Tensor, mask: torch.Tensor, **columns: torch.Tensor) -> LossInputs:
    rows = torch.tensor(advantages)[:, None].expand_as(mask)
    return LossInputs(
        mask,
        rows,
        old,
        columns.get("reference", torch.zeros_like(old)),
        columns.get("weights", torch.ones_like(old)),
    )


def test_gradient_at_the_sampling_policy_is_the_policy_gradient() -> None:
    log_probs = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]], requires_grad=True)
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    policy_loss, data = ClippedPolicyLoss(AlgorithmConfig()), inputs([2.0, -1.0], log_probs.detach(), mask)
    loss, metrics = policy_loss(log_probs, torch.zeros(2, 2), data)
    (loss / policy_loss.denominator(data)).backward()
    assert log_probs.grad is not None
    torch.testing.assert_close(log_probs.grad, torch.tensor([[-2.0, -2.0], [1.0, 0.0]]) / 3)
    assert policy_loss.denominator(data) == 3 and metrics["clip_fraction"] == 0


@pytest.mark.parametrize(("advantage", "ratio", "moves"), [(1.0, 1.5, False), (1.0, 0.5, True), (-1.0, 0.5, False)])
def test_clip_stops_only_what_already_went_far_enough(advantage: float, ratio: float, moves: bool) -> None:
    old = torch.tensor([[-2.0]])
    log_probs = (old + math.log(ratio)).requires_grad_()
    loss, metrics = ClippedPolicyLoss(AlgorithmConfig())(
        log_probs, torch.zeros(1, 1), inputs([advantage], old, torch.ones(1, 1))
    )
    loss.backward()
    assert log_probs.grad is not None
    assert bool(log_probs.grad.abs().sum() > 0) is moves
    assert bool(metrics["clip_fraction"] == 1) is not moves


def test_sequence_mean_weighs_responses_and_token_mean_weighs_tokens() -> None:
    log_probs = torch.zeros(2, 3)
    mask = torch.tensor([[1.0, 0, 0], [1, 1, 1]])
    data = inputs([1.0, 2.0], log_probs, mask)
    sequence = ClippedPolicyLoss(AlgorithmConfig(loss_aggregation="sequence_mean"))
    token = ClippedPolicyLoss(AlgorithmConfig())
    for loss, expected in ((sequence, -(1 + 2) / 2), (token, -(1 + 2 * 3) / 4)):
        assert float(loss(log_probs, log_probs, data)[0] / loss.denominator(data)) == pytest.approx(expected)


def test_kl_and_entropy_terms_enter_with_their_coefficients() -> None:
    log_probs, mask = torch.full((1, 1), -1.0), torch.ones(1, 1)
    data = inputs([0.0], log_probs, mask, reference=torch.full((1, 1), -1.5))
    config = AlgorithmConfig(kl=KlConfig(coefficient=0.5), entropy_coefficient=0.1)
    loss, metrics = ClippedPolicyLoss(config)(log_probs, torch.full((1, 1), 2.0), data)
    kl = math.exp(-0.5) - 1 + 0.5
    assert float(loss) == pytest.approx(0.5 * kl - 0.1 * 2.0)
    assert float(metrics["kl"]) == pytest.approx(kl)


def test_supervised_loss_counts_response_tokens_only() -> None:
    log_probs, mask = torch.tensor([[-1.0, -2.0, -4.0]]), torch.tensor([[0.0, 1.0, 1.0]])
    data = inputs([1.0], log_probs, mask)
    loss, _ = negative_log_likelihood(log_probs, log_probs, data)
    assert float(loss) == 6.0 and float(negative_log_likelihood.denominator(data)) == 2.0


WILD = [-math.inf, math.inf, -200.0, 200.0, math.nan]


@pytest.mark.parametrize("wild", WILD)
@pytest.mark.parametrize("column", ["log_probs", "entropy", "advantages", "old", "reference", "weights"])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_what_stands_at_a_masked_position_changes_neither_loss_nor_gradient(
    aggregation: str, column: str, wild: float
) -> None:
    config = AlgorithmConfig(loss_aggregation=aggregation, kl=KlConfig(coefficient=0.5), entropy_coefficient=0.1)
    mask = torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]])

    def outcome(value: float) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        generator = torch.Generator().manual_seed(2)
        names = ("log_probs", "entropy", "advantages", "old", "reference", "weights")
        columns = {name: torch.randn(2, 3, generator=generator) for name in names}
        columns[column].masked_fill_(mask == 0, value)
        leaves = [columns["log_probs"].requires_grad_(), columns["entropy"].requires_grad_()]
        data = LossInputs(mask, *(columns[name] for name in names[2:]))
        loss, metrics = ClippedPolicyLoss(config)(leaves[0], leaves[1], data)
        supervised, _ = negative_log_likelihood(leaves[0], leaves[1], data)
        (loss + supervised).backward()
        return metrics | {"total": loss, "supervised": supervised}, [
            leaf.grad for leaf in leaves if leaf.grad is not None
        ]

    found, expected = outcome(wild), outcome(0.0)
    assert len(found[1]) == 2
    torch.testing.assert_close(found, expected, atol=0, rtol=0)
    assert all(bool(torch.all(gradient[mask == 0] == 0)) for gradient in found[1])


@given(st.floats(-20, 0), st.floats(-20, 0))
def test_k3_is_never_negative(p: float, q: float) -> None:
    assert float(k3_estimate(torch.tensor(p, dtype=torch.float64), torch.tensor(q, dtype=torch.float64))) >= 0


def mismatch_of(rollout: list[list[float]], actor: list[list[float]], **columns: torch.Tensor) -> Mismatch:
    flat = [torch.tensor([value for row in rows for value in row]) for rows in (rollout, actor)]
    sequences = [(0, *range(len(row))) for row in rollout]
    batch = RolloutBatch.of_sequences(
        sequences, [1] * len(rollout), rollout_log_probs_G=flat[0], old_log_probs_G=flat[1], **columns
    )
    return Mismatch.of(mismatch_per_sample(batch))


def test_mismatch_of_equal_columns_is_zero_and_of_others_as_computed_by_hand() -> None:
    assert mismatch_of([[-1.0, -2.0]], [[-1.0, -2.0]]) == Mismatch(0, 0, 0)
    found = mismatch_of([[-1.0], [-2.0]], [[-1.5], [-2.0]])
    assert found.mean_abs == 0.25 and found.max_abs == 0.5
    assert found.k3_kl == pytest.approx((math.exp(-0.5) - 1 + 0.5) / 2)
    assert mismatch_of([[-1.0], [-2.0, 0.0]], [[-1.5], [-2.0, -1.0]]).mean_abs == 0.5  # over tokens, not responses
    masked = torch.tensor([True, False])
    assert mismatch_of([[-1.0], [-2.0]], [[-1.5], [-9.0]], loss_mask_G=masked) == Mismatch(0.5, 0.5, found.k3_kl * 2)
    assert math.isnan(mismatch_of([[-1.0, -math.inf]], [[-1.0, -math.inf]]).mean_abs)


def test_tokens_of_earlier_policies_are_no_mismatch() -> None:
    """The engine had other weights when it sampled them, so their difference is what the policy learned."""
    batch = RolloutBatch.of_sequences(
        [(0, 1, 2), (0, 3)],
        [1, 1],
        rollout_log_probs_G=torch.tensor([-1.0, -2.0, -3.0]),
        old_log_probs_G=torch.tensor([-9.0, -2.5, -3.0]),
        versions_G=torch.tensor([3, 5, 5], dtype=torch.int32),
    )
    batch = replace(batch, versions_N=torch.tensor([5, 5]))
    assert Mismatch.of(mismatch_per_sample(batch)).mean_abs == 0.25
    assert Mismatch.of(mismatch_per_sample(batch, stale=True)).mean_abs == 8.0


def test_mismatch_beyond_the_threshold_fails_only_when_asked() -> None:
    found = Mismatch(0.2, 1.0, 0.1)
    enforce(found, MismatchConfig(action="log"), 3)
    enforce(found, MismatchConfig(action="fail", threshold=0.3), 3)
    with pytest.raises(RunError, match=r"step 3: .*0\.2 nats"):
        enforce(found, MismatchConfig(action="fail", threshold=0.1), 3)
    with pytest.raises(RunError):
        enforce(Mismatch(math.nan, 0, 0), MismatchConfig(action="fail"), 3)


def test_groups_of_equal_rewards_are_not_mixed() -> None:
    assert np.std([0.1, 0.1, 0.1]) > 0, "which is why the standard deviation cannot say so"
    assert mixed_groups([0.1, 0.1, 0.1, 0.0, 1.0, 1.0], 3) == 0.5


def test_kl_is_summed_over_each_response() -> None:
    old, reference = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.5, -2.0, -1.5])
    batch = RolloutBatch.of_sequences(
        [(0, 1), (0, 1, 2)], [1, 1], [0.0, 0.0], old_log_probs_G=old, reference_log_probs_G=reference
    )
    assert kl_per_sample(batch, "k1")[:, 0].tolist() == [0.5, 1.0]
    assert kl_per_sample(batch, "k2")[:, 0].tolist() == [0.125, 0.5]
    first = torch.zeros(len(batch.old_log_probs_G), dtype=torch.bool)  # as of an environment's tokens
    first[0] = True
    assert kl_per_sample(batch.with_columns(loss_mask_G=~first), "k1")[1:, 0].tolist() == [1.0]
    assert kl_per_sample(batch.with_columns(loss_mask_G=first), "k1")[1:, 0].tolist() == [0.0]

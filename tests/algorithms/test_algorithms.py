"""Credit assignment, losses and mismatch on plain tensors."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_tlt.algorithms.advantages import group_relative_advantages
from megatron_tlt.algorithms.losses import ClippedPolicyLoss, LossInputs, k3_estimate, negative_log_likelihood
from megatron_tlt.algorithms.mismatch import Mismatch, enforce, measure_mismatch, truncated_importance_weights
from megatron_tlt.algorithms.types import TrainingSample
from megatron_tlt.config.schema import AlgorithmConfig, MismatchConfig
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
    loss, denominator, metrics = ClippedPolicyLoss(AlgorithmConfig())(
        log_probs, torch.zeros(2, 2), inputs([2.0, -1.0], log_probs.detach(), mask)
    )
    (loss / denominator).backward()
    assert log_probs.grad is not None
    torch.testing.assert_close(log_probs.grad, torch.tensor([[-2.0, -2.0], [1.0, 0.0]]) / 3)
    assert denominator == 3 and metrics["clip_fraction"] == 0


@pytest.mark.parametrize(("advantage", "ratio", "moves"), [(1.0, 1.5, False), (1.0, 0.5, True), (-1.0, 0.5, False)])
def test_clip_stops_only_what_already_went_far_enough(advantage: float, ratio: float, moves: bool) -> None:
    old = torch.tensor([[-2.0]])
    log_probs = (old + math.log(ratio)).requires_grad_()
    loss, _, metrics = ClippedPolicyLoss(AlgorithmConfig())(
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
    sequence = ClippedPolicyLoss(AlgorithmConfig(loss_aggregation="sequence_mean"))(log_probs, log_probs, data)
    token = ClippedPolicyLoss(AlgorithmConfig())(log_probs, log_probs, data)
    assert float(sequence[0] / sequence[1]) == pytest.approx(-(1 + 2) / 2)
    assert float(token[0] / token[1]) == pytest.approx(-(1 + 2 * 3) / 4)


def test_kl_and_entropy_terms_enter_with_their_coefficients() -> None:
    log_probs, mask = torch.full((1, 1), -1.0), torch.ones(1, 1)
    data = inputs([0.0], log_probs, mask, reference=torch.full((1, 1), -1.5))
    config = AlgorithmConfig(kl_coefficient=0.5, entropy_coefficient=0.1)
    loss, _, metrics = ClippedPolicyLoss(config)(log_probs, torch.full((1, 1), 2.0), data)
    kl = math.exp(-0.5) - 1 + 0.5
    assert float(loss) == pytest.approx(0.5 * kl - 0.1 * 2.0)
    assert float(metrics["kl"]) == pytest.approx(kl)


def test_supervised_loss_counts_response_tokens_only() -> None:
    log_probs, mask = torch.tensor([[-1.0, -2.0, -4.0]]), torch.tensor([[0.0, 1.0, 1.0]])
    loss, tokens, _ = negative_log_likelihood(log_probs, log_probs, inputs([1.0], log_probs, mask))
    assert float(loss) == 6.0 and float(tokens) == 2.0


@given(st.floats(-20, 0), st.floats(-20, 0))
def test_k3_is_never_negative(p: float, q: float) -> None:
    assert float(k3_estimate(torch.tensor(p, dtype=torch.float64), torch.tensor(q, dtype=torch.float64))) >= 0


def test_mismatch_of_equal_columns_is_zero_and_of_others_as_computed_by_hand() -> None:
    assert measure_mismatch([[-1.0, -2.0]], [[-1.0, -2.0]]) == Mismatch(0, 0, 0)
    found = measure_mismatch([[-1.0], [-2.0]], [[-1.5], [-2.0]])
    assert found.mean_abs == 0.25 and found.max_abs == 0.5
    assert found.k3_kl == pytest.approx((math.exp(-0.5) - 1 + 0.5) / 2)
    with pytest.raises(ValueError, match="response 0: 1 rollout log-probs, 2"):
        measure_mismatch([[-1.0]], [[-1.0, -1.0]])


def test_mismatch_beyond_the_threshold_fails_only_when_asked() -> None:
    found = Mismatch(0.2, 1.0, 0.1)
    enforce(found, MismatchConfig(action="log"), 3)
    enforce(found, MismatchConfig(action="fail", threshold=0.3), 3)
    with pytest.raises(RunError, match=r"step 3: .*0\.2 nats"):
        enforce(found, MismatchConfig(action="fail", threshold=0.1), 3)
    with pytest.raises(RunError):
        enforce(Mismatch(math.nan, 0, 0), MismatchConfig(action="fail"), 3)


def test_importance_weights_are_truncated_from_above_only() -> None:
    weights = truncated_importance_weights([-1.0, -1.0], [-0.1, -2.0], 2.0)
    assert weights == pytest.approx((2.0, math.exp(-1.0)))


def test_a_sample_with_a_column_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="old_log_probs has 1 entries for a response of 2"):
        TrainingSample((1, 2, 3), 1, old_log_probs=(0.0,))
    with pytest.raises(ValueError, match="prompt_length 3"):
        TrainingSample((1, 2, 3), 3)

"""Weights and rejections for responses of a slightly different policy, against plain formulas."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_tlt.algorithms.clipped import ClippedPolicyLoss
from megatron_tlt.algorithms.correction import correct, correction_metrics, rejected, token_weights
from megatron_tlt.algorithms.losses import LossInputs
from megatron_tlt.config.algorithm import AlgorithmConfig, CorrectionConfig
from megatron_tlt.config.loader import load_config
from megatron_tlt.config.migrations import MIGRATIONS, migrate
from megatron_tlt.data.rollout_batch import RolloutBatch
from tests.config.test_loader import violations, write

RATIOS = st.lists(st.floats(-3, 3), min_size=1, max_size=20)


def weights_of(log_ratio: list[float], **options: Any) -> list[float]:
    log_ratio_T = torch.tensor(log_ratio, dtype=torch.float64)
    return token_weights(
        log_ratio_T, torch.ones(len(log_ratio), dtype=torch.bool), CorrectionConfig(**options)
    ).tolist()


@given(RATIOS)
def test_token_weights_are_ratios_truncated_from_above_only(log_ratio: list[float]) -> None:
    expected = [min(math.exp(value), 2.0) for value in log_ratio]
    assert weights_of(log_ratio, weights="token") == pytest.approx(expected)


@given(RATIOS)
def test_a_sequence_weight_is_the_truncated_product(log_ratio: list[float]) -> None:
    product = min(math.exp(sum(log_ratio)), 3.0)
    assert weights_of(log_ratio, weights="sequence", truncation=3.0) == pytest.approx([product] * len(log_ratio))


@given(RATIOS)
def test_icepop_keeps_the_ratio_inside_of_its_bounds_and_drops_the_token_outside(log_ratio: list[float]) -> None:
    found = weights_of(log_ratio, weights="token", truncation=5.0, token_bounds=(0.5, 5.0))
    ratios = [math.exp(value) for value in log_ratio]
    assert found == pytest.approx([ratio if 0.5 <= ratio <= 5.0 else 0.0 for ratio in ratios])
    alone = weights_of(log_ratio, token_bounds=(0.5, 5.0))
    assert alone == [float(0.5 <= ratio <= 5.0) for ratio in ratios]


@pytest.mark.filterwarnings("error")
def test_huge_ratios_are_truncated() -> None:
    assert weights_of([math.inf, 2000.0, -math.inf], weights="token", truncation=1.0) == [1.0, 1.0, 0.0]
    assert weights_of([], weights="token") == []


@given(RATIOS)
def test_a_response_is_rejected_by_its_means(log_ratio: list[float]) -> None:
    values = torch.tensor(log_ratio, dtype=torch.float64)
    mean = sum(log_ratio) / len(log_ratio)
    k3 = sum(math.exp(value) - 1 - value for value in log_ratio) / len(log_ratio)
    inside = 0.9 <= math.prod(math.exp(value) for value in log_ratio) ** (1 / len(log_ratio)) <= 1.5
    assert rejected(values, CorrectionConfig(geometric_mean_bounds=(0.9, 1.5))) is not inside
    assert rejected(values, CorrectionConfig(max_k1=0.5)) is (abs(mean) > 0.5)
    assert rejected(values, CorrectionConfig(max_k3=0.5)) is (k3 > 0.5)
    assert rejected(torch.tensor([math.nan]), CorrectionConfig(max_k1=0.5))


def batch_of(rollout: list[list[float]], actor: list[list[float]], mask: list[bool] | None = None) -> RolloutBatch:
    flat = [torch.tensor([value for row in rows for value in row]) for rows in (rollout, actor)]
    columns = {} if mask is None else {"loss_mask_G": torch.tensor(mask)}
    return RolloutBatch.of_sequences(
        [(0, *range(len(row))) for row in rollout],
        [1] * len(rollout),
        rollout_log_probs_G=flat[0],
        old_log_probs_G=flat[1],
        **columns,
    )


def test_a_rejected_response_leaves_the_loss_and_a_masked_token_does_not_judge_it() -> None:
    batch = batch_of([[-1.0, -1.0], [-1.0], [-1.0, -9.0]], [[-1.0, -1.1], [-2.0], [-1.0, -1.0]], [True] * 4 + [False])
    corrected, sums = correct(batch, CorrectionConfig(weights="token", max_k1=0.5))
    assert corrected.loss_mask_G is not None and corrected.token_weights_G is not None
    assert corrected.loss_mask_G.tolist() == [True, True, False, True, False]
    assert corrected.token_weights_G.tolist() == pytest.approx([1.0, math.exp(-0.1), math.exp(-1), 1.0, 2.0])
    found = correction_metrics(sums)
    assert found["correction/rejected_share"] == pytest.approx(1 / 3)
    assert found["correction/rejected_token_share"] == pytest.approx(1 / 4)
    assert found["correction/weight_mean"] == pytest.approx((2 + math.exp(-0.1) + math.exp(-1)) / 4)
    assert correct(batch, CorrectionConfig(weights="token"))[0].loss_mask_G is batch.loss_mask_G


def test_opsm_drops_a_bad_response_that_the_policy_has_left() -> None:
    """slime's compute_opsm_mask: advantage below 0 and the mean of old minus new above the bound."""
    old = torch.zeros(4, 2)
    log_probs = torch.tensor([[-0.5, -0.7], [-0.5, -0.7], [-0.1, -0.1], [-0.5, 9.0]], requires_grad=True)
    mask = torch.tensor([[1.0, 1], [1, 1], [1, 1], [1, 0]])
    advantages = torch.tensor([-1.0, 1.0, -1.0, -1.0])[:, None].expand(4, 2)
    inputs = LossInputs(mask, advantages, old, old, torch.ones(4, 2))
    config = AlgorithmConfig(clip_low=1.0, correction=CorrectionConfig(opsm_delta=0.3))
    loss, metrics = ClippedPolicyLoss(config)(log_probs, torch.zeros(4, 2), inputs)
    loss.backward()
    assert log_probs.grad is not None
    assert (log_probs.grad != 0).any(dim=1).tolist() == [False, True, True, False]
    assert float(metrics["opsm_fraction"]) == 3.0


def test_the_correction_of_before_is_refused_with_its_new_key_and_migrated(tmp_path: Path) -> None:
    (line,) = violations(write(tmp_path), "algorithm.mismatch.action=correct")
    assert "algorithm.mismatch.action: " in line and "algorithm.correction.weights: token" in line
    (line,) = violations(write(tmp_path), "algorithm.mismatch.truncation=3")
    assert "algorithm.correction.truncation" in line
    old = {"algorithm": {"mismatch": {"action": "correct", "truncation": 3.0, "threshold": 0.1}}}
    migrated = migrate(old, "here", MIGRATIONS)
    assert migrated["algorithm"] == {
        "mismatch": {"action": "log", "threshold": 0.1},
        "correction": {"truncation": 3.0, "weights": "token"},
    }


def test_what_contradicts_itself_is_refused(tmp_path: Path) -> None:
    lines = violations(
        write(tmp_path), "algorithm={correction: {bypass: true, weights: token}, mismatch: {action: fail}}"
    )
    assert "algorithm.correction: found bypass with weights" in lines[0]
    assert "algorithm.mismatch.action: found fail" in lines[1]
    (line,) = violations(write(tmp_path), "algorithm.correction.token_bounds=[1.5, 2]")
    assert "a lower bound from 0 to 1" in line
    load_config(write(tmp_path), ["algorithm.correction={bypass: true, opsm_delta: 0.1}"], check_libraries=False)

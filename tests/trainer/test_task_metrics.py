"""What a step's metrics say of its tasks."""

from __future__ import annotations

import pytest
import torch

from megatron_tlt.actor.scores import entropy_sum
from megatron_tlt.data.rollout_batch import RolloutBatch
from megatron_tlt.rewards.types import Reward
from megatron_tlt.rollout.types import DraftStats
from megatron_tlt.trainer.responses import ScoredResponse
from megatron_tlt.trainer.task_metrics import (
    advantage_metrics,
    entropy_metrics,
    length_metrics,
    reward_spread,
    task_metrics,
)


def scored(problem: int, sample: int, length: int, reward: Reward, finish: str = "stop") -> ScoredResponse:
    return ScoredResponse(problem, sample, 2, length, finish, DraftStats(), reward)


def test_metrics_of_tasks_are_over_their_own_responses() -> None:
    responses = [
        scored(0, 0, 4, Reward(1.0, True, "2")),
        scored(0, 1, 6, Reward(0.0, False)),
        scored(1, 0, 10, Reward(0.5, False, "3"), "length"),
        scored(1, 1, 20, Reward(0.5, False, "4"), "length"),
    ]
    tasks = ["sums", "sums", "openai/gsm8k", "openai/gsm8k"]
    found = task_metrics(tasks, responses, 2)
    assert found == {
        "task/sums/responses": 2,
        "task/sums/reward": 0.5,
        "task/sums/correct": 0.5,
        "task/sums/extracted": 0.5,
        "task/sums/mixed_groups": 1.0,
        "task/sums/length_mean": 5.0,
        "task/sums/length_max": 6.0,
        "task/sums/truncated": 0.0,
        "task/openai/gsm8k/responses": 2,
        "task/openai/gsm8k/reward": 0.5,
        "task/openai/gsm8k/correct": 0.0,
        "task/openai/gsm8k/extracted": 1.0,
        "task/openai/gsm8k/mixed_groups": 0.0,
        "task/openai/gsm8k/length_mean": 15.0,
        "task/openai/gsm8k/length_max": 20.0,
        "task/openai/gsm8k/truncated": 1.0,
    }
    assert reward_spread([1.0, 0.0, 0.5, 0.5], 2) == {
        "reward/std": pytest.approx(0.125**0.5),
        "reward/group_std": pytest.approx(0.5 * 0.5**0.5),
        "reward/min": 0.0,
        "reward/max": 1.0,
    }


def test_advantages_are_averaged_over_tokens_and_lengths_over_responses() -> None:
    found = advantage_metrics([2.0, -1.0], [1, 3])
    assert found == {
        "advantage/mean": pytest.approx(-0.25),
        "advantage/std": pytest.approx((0.25 * 2.25**2 + 0.75 * 0.75**2) ** 0.5),
        "advantage/min": -1.0,
        "advantage/max": 2.0,
    }
    found = length_metrics([1, 3, 8], [5, 5, 8])
    assert (found["length/mean"], found["length/median"], found["length/min"], found["length/max"]) == (4, 3, 1, 8)
    assert (found["length/prompt_mean"], found["length/prompt_min"], found["length/prompt_max"]) == (6, 5, 8)


def test_entropy_is_a_mean_over_tokens_not_over_responses() -> None:
    found = entropy_metrics(["a", "b", "a"], [3.0, 2.0, 0.0], [1, 2, 2])
    assert found == {"rollout/entropy": 1.0, "task/a/entropy": 1.0, "task/b/entropy": 1.0}
    assert entropy_metrics(["a", "b"], [9.0, 1.0], [3, 1])["rollout/entropy"] == 2.5


def test_the_entropy_is_of_tokens_in_the_loss_mask() -> None:
    entropies = torch.tensor([1.0, 2.0, 4.0])
    plain = RolloutBatch.of_sequences([[7, 1, 2, 3], [7, 8, 4, 5, 6]], [1, 2])
    mask = torch.tensor([True, True, True, True, False, True])
    assert entropy_sum(plain, 1, entropies).item() == 7.0
    masked = plain.with_columns(loss_mask_G=mask)
    assert [entropy_sum(masked, sample, entropies).item() for sample in (0, 1)] == [7.0, 5.0]

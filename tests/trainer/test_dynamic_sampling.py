"""Which problems a step trains on, with rewards that are set."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_tlt.algorithms.overlong import penalized, without_truncated
from megatron_tlt.config.algorithm import AlgorithmConfig, DynamicSamplingConfig, OverlongConfig
from megatron_tlt.data.rollout_batch import RolloutBatch
from megatron_tlt.rewards.types import Reward
from megatron_tlt.rollout.types import DraftStats
from megatron_tlt.tasks.types import Problem
from megatron_tlt.trainer.dynamic_sampling import Collected, collect_problems
from megatron_tlt.trainer.experience import PhaseTimes
from megatron_tlt.trainer.responses import ScoredResponse

GROUP = 2


def problem(index: int) -> Problem:
    return Problem(str(index), "numbers", f"p{index}", "", "exact")


def run(differs: Sequence[bool], wanted: int, options: DynamicSamplingConfig, first: int = 0) -> Collected:
    """Problem i has different rewards if ``differs[i]``; this rank holds the responses to problems of even index."""

    def collect(problems: list[Problem], generation: int) -> tuple[list[ScoredResponse], RolloutBatch, PhaseTimes]:
        scored, tokens = [], []
        for at, asked in enumerate(problems):
            index = int(asked.uid)
            for sample in range(GROUP):
                reward = Reward(float(sample) if differs[index] else 1.0, True)
                scored.append(ScoredResponse(at, sample, 1, 1 + index % 3, "stop", DraftStats(), reward))
                tokens.append([index] * (2 + index % 3))
        columns = {"rollout_log_probs_G": torch.tensor([float(n) for row in tokens for n in row[1:]])}
        whole = RolloutBatch.of_sequences(tokens, [1] * len(tokens), **columns)
        mine = [i for i, row in enumerate(tokens) if row[0] % 2 == 0]
        return scored, whole.holding(mine), PhaseTimes(1.0, 2.0, 3.0)

    return collect_problems(problem, first, wanted, GROUP, options, collect)


@settings(max_examples=100)
@given(
    st.lists(st.booleans(), min_size=300, max_size=300),
    st.integers(1, 8),
    st.integers(1, 5),
    st.sampled_from([1.0, 1.5, 2.0]),
)
def test_problems_that_differ_come_first_and_the_size_stays(
    differs: list[bool], wanted: int, generations: int, over_sample: float
) -> None:
    options = DynamicSamplingConfig(enabled=True, max_generations=generations, over_sample=over_sample)
    found = run(differs, wanted, options)
    drawn = range(found.drawn)
    mixed = [i for i in drawn if differs[i]][:wanted]
    filled = [i for i in drawn if not differs[i]][: wanted - len(mixed)]
    assert [int(p.uid) for p in found.problems] == sorted([*mixed, *filled])
    assert len(filled) == 0 or found.generations == generations, "dropped ones are used in need alone"
    assert found.times == PhaseTimes(found.generations, 2.0 * found.generations, 3.0 * found.generations)
    assert found.tokens == sum(GROUP * (1 + i % 3) for i in drawn)
    # responses and batch agree, numbered anew
    assert [(s.problem, s.sample) for s in found.scored] == [(p, s) for p in range(wanted) for s in range(GROUP)]
    uids = [int(found.problems[s.problem].uid) for s in found.scored]
    assert found.batch.lengths == [2 + uid % 3 for uid in uids]
    assert found.batch.held == tuple(i for i, uid in enumerate(uids) if uid % 2 == 0)
    for i in found.batch.held:
        assert set(found.batch.tokens(i).tolist()) == {uids[i]}
        assert set(found.batch.response("rollout_log_probs_G", i).tolist()) == {float(uids[i])}


def test_without_dynamic_sampling_a_step_has_one_rollout() -> None:
    found = run([False] * 9, 3, DynamicSamplingConfig(), first=4)
    assert [p.uid for p in found.problems] == ["4", "5", "6"] and (found.generations, found.drawn) == (1, 3)


def test_dapo_turns_it_on_whatever_else_is_set() -> None:
    config = AlgorithmConfig.model_validate({"name": "dapo", "dynamic_sampling": {"max_generations": 3}})
    assert config.dynamic_sampling == DynamicSamplingConfig(enabled=True, max_generations=3)
    assert (config.clip_low, config.clip_high, config.overlong.penalty) == (0.2, 0.28, 1.0)
    assert set(config.recipe_values) == {"clip_high", "overlong.penalty", "dynamic_sampling.enabled"}


def test_the_penalty_grows_over_the_buffer() -> None:
    """DAPO 2503.14476, eq. 13, with a limit of 100 tokens and a cache of 20."""
    lengths = [1, 80, 85, 90, 100]
    found = penalized([1.0] * 5, lengths, 100, OverlongConfig(penalty=2.0, buffer=0.2))
    assert found == pytest.approx([1.0, 1.0, 1 - 2 * 0.25, 1 - 2 * 0.5, -1.0])


def test_truncated_responses_leave_the_loss() -> None:
    sequences = [[0, 1], [0, 1, 2], [0, 1]]
    batch = RolloutBatch.of_sequences(sequences, [1, 1, 1]).holding([1, 2])
    filtered = without_truncated(batch, [True, True, False])
    assert filtered.loss_mask_G is not None and filtered.loss_mask_G.tolist() == [False, False, True]
    before = batch.with_columns(loss_mask_G=torch.tensor([True, True, False]))
    again = without_truncated(before, [False, True, False])
    assert again.loss_mask_G is not None and again.loss_mask_G.tolist() == [False, False, False]

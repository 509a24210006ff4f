"""What the collector refuses before an engine sees it, and a reward pool that fails on one rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from megatron_tlt.config.schema import RolloutConfig, TltConfig
from megatron_tlt.config.task import TaskConfig
from megatron_tlt.data.tokenizer import Tokenizer, load_tokenizer, response_text
from megatron_tlt.data.tokenizer_training import train_tokenizer
from megatron_tlt.errors import ConfigError, RunError
from megatron_tlt.observe.timeline import Timeline
from megatron_tlt.rollout.types import Response, SamplingSpec
from megatron_tlt.tasks.mixture import build_sources
from megatron_tlt.tasks.types import Problem
from megatron_tlt.trainer.dealing import Dealing
from megatron_tlt.trainer.experience import ExperienceCollector
from megatron_tlt.trainer.rank_speeds import places_of
from megatron_tlt.trainer.requests import evaluation_sampling, prompt_limit
from megatron_tlt.trainer.responses import check_responses
from tests.helpers.launch import run_torchrun
from tests.helpers.tiny_models import build_qwen2, write_letters_tokenizer


def collector_with(tokenizer: Tokenizer) -> ExperienceCollector:
    unused = cast(Any, None)
    return ExperienceCollector(
        unused,
        tokenizer,
        unused,
        max_prompt_tokens=6,
        max_response_tokens=8,
        tensor_parallel_size=1,
        timeline=Timeline(0),
    )


def test_a_prompt_over_the_limit_is_named_with_both_lengths(tmp_path: Path) -> None:
    collector = collector_with(train_tokenizer(["sum 1+2"], 104, tmp_path / "tokenizer"))
    problem = Problem("chain_sum/7", "chain_sum", "sum 1+2", "3", "reasoning_gym")
    with pytest.raises(ConfigError, match=r"chain_sum/7: its prompt has 7 tokens; .*max_prompt_tokens: 6"):
        collector.collect([problem], 1, SamplingSpec(), (0,))


@pytest.mark.parametrize(("tokens", "log_probs"), [((1, 2), (-0.5,)), ((), ())])
def test_a_response_without_a_log_prob_for_each_token_is_refused(
    tokens: tuple[int, ...], log_probs: tuple[float, ...]
) -> None:
    good, bad = Response("0-0", (1,), (2,), (-0.5,), "stop", 0.0), Response("0-1", (1,), tokens, log_probs, "stop", 0.0)
    with pytest.raises(RunError, match=rf"response 0-1: .* {len(tokens)} tokens with {len(log_probs)} log-probs"):
        check_responses([good, bad])
    check_responses([good])


def test_whichever_token_ended_a_response_is_not_in_its_text(tmp_path: Path) -> None:
    plain = train_tokenizer(["sum 1+2"], 104, tmp_path)
    (turn_ends,) = plain.encode("+")  # as in chat models, whose turns end with another token than their sequences
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [plain.eos_id, turn_ends]}))
    tokenizer = load_tokenizer(tmp_path)
    answer = tuple(tokenizer.encode("sum 1+2"))
    for end in tokenizer.stop_ids:
        assert response_text(tokenizer, (*answer, end)) == "sum 1+2"
    assert response_text(tokenizer, answer) == "sum 1+2"


def test_a_run_leaves_out_the_prompts_that_its_collector_would_refuse(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["sum 1+2"], 104, tmp_path / "tokenizer")
    rows = [{"prompt": "1" * length, "reward_model": {"ground_truth": "1"}} for length in range(1, 13)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = TaskConfig(kind="file", name="p", path=tmp_path / "p.jsonl", held_out_fraction=1e-9)
    limit = prompt_limit(RolloutConfig(max_prompt_tokens=6, filter_overlong_prompts=True), tokenizer)
    problems = build_sources([task], "train", 0, limit).problems(0, 12)
    assert {len(problem.prompt) for problem in problems} == set(range(1, 7))
    assert len(collector_with(tokenizer)._requests(problems, 1, SamplingSpec(), (0,))[0]) == 12
    with pytest.raises(ConfigError, match=r"p\.jsonl:7: its prompt has 7 tokens"):
        build_sources([task], "train", 0, prompt_limit(RolloutConfig(max_prompt_tokens=6), tokenizer))


def test_evaluations_are_sampled_as_rollouts_are_unless_they_say_otherwise(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["sum 1+2"], 104, tmp_path)
    rollout = {"sampling": {"temperature": 0.7, "top_p": 0.9, "top_k": 20}, "max_response_tokens": 5}

    def sampling(greedy: bool = False, **evaluation: float) -> tuple[float, float, int]:
        values = {"model": {"recipe": {}}, "tasks": [{"name": "gcd"}], "rollout": rollout, "evaluation": evaluation}
        config = TltConfig.model_validate(values)
        found = evaluation_sampling(config.evaluation, config.rollout, tokenizer, greedy=greedy)
        assert (found.max_tokens, found.stop_token_ids) == (5, tokenizer.stop_ids)
        return found.temperature, found.top_p, found.top_k

    assert sampling() == (1.0, 0.9, 20)
    assert sampling(temperature=0.6, top_p=0.95, top_k=-1) == (0.6, 0.95, -1)
    assert sampling(greedy=True) == (0.0, 1.0, -1)


@pytest.mark.distributed
def test_a_pool_that_fails_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    folder = build_qwen2(tmp_path / "model", vocab_size=32, tie=False)
    write_letters_tokenizer(folder, 32)
    worker = Path(__file__).parent / "workers" / "broken_pool.py"
    run_torchrun(worker, 2, [str(folder), str(tmp_path)], timeout_s=240)
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert all("Too many open files" in rank["raised"] for rank in ranks)
    assert max(rank["seconds"] for rank in ranks) < 60  # and not the collectives' time-out of ten minutes


@pytest.mark.parametrize(("problems", "speeds"), [(10, [1.0] * 4), (3, [1.0] * 4), (8, [1.0, 0.4])])
def test_an_engines_progress_ends_at_its_own_responses(problems: int, speeds: list[float]) -> None:
    engines = range(len(speeds))
    dealt = [Dealing(len(speeds), speeds).engine_of(position) for position in range(problems)]
    assert [Dealing(len(speeds), speeds).num_dealt(problems, one) for one in engines] == [*map(dealt.count, engines)]
    even = [Dealing(len(speeds)).engine_of(position) for position in range(problems)]
    assert even == [position % len(speeds) for position in range(problems)]
    assert (dealt == even) == (len(set(speeds)) == 1)


def test_ranks_are_in_the_order_of_the_nodes_indices_not_of_their_addresses() -> None:
    assert places_of([(1, 0), (1, 1), (0, 0), (0, 1)], 2, 2) == [2, 3, 0, 1]
    assert places_of([(4, 0), (4, 1), (1, 0), (1, 1)], 2, 2) == [2, 3, 0, 1], "some nodes were lost"
    assert places_of([(0, 0), (0, 1), (0, 0), (0, 1)], 2, 2) == [0, 1, 2, 3], "nobody says which node is which"

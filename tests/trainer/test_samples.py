"""What a row of samples.jsonl says of a response."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_tlt.data.rollout_batch import RolloutBatch
from megatron_tlt.data.tokenizer_training import train_tokenizer
from megatron_tlt.observe.jsonl import dumps
from megatron_tlt.observe.samples import TRAIN
from megatron_tlt.rewards.types import Reward
from megatron_tlt.rollout.types import DraftStats
from megatron_tlt.tasks.types import Problem
from megatron_tlt.trainer.responses import ScoredResponse
from megatron_tlt.trainer.samples import SampleRows

PROBLEMS = [Problem("sums/0", "sums", "1+1", "2", "math"), Problem("openai/gsm8k/0", "openai/gsm8k", "2+2", "", "math")]


def scored(problem: int, sample: int, length: int, reward: Reward, finish: str = "stop") -> ScoredResponse:
    return ScoredResponse(problem, sample, 2, length, finish, DraftStats(num_steps=2, num_tokens=3), reward)


def batch_of(*responses: list[int]) -> RolloutBatch:
    return RolloutBatch.of_sequences([[5, 6, *tokens] for tokens in responses], [2] * len(responses))


def test_rows_are_what_was_asked_and_said(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["1+1=2"], 104, tmp_path)
    prompt, said = tokenizer.encode("1+1"), [*tokenizer.encode("=2\n#### 2"), tokenizer.eos_id]
    draft = DraftStats(num_steps=3, num_tokens=7)
    response = ScoredResponse(0, 1, len(prompt), len(said), "stop", draft, Reward(1.0, True, "2"))
    batch = RolloutBatch.of_sequences([prompt + said], [len(prompt)])
    (row,) = SampleRows(tokenizer, 3, 100).rows(TRAIN, PROBLEMS, [response], batch)
    assert row == {
        "origin": "train",
        "task": "sums",
        "problem": "sums/0",
        "sample": 1,
        "chosen": ["best", "worst", "longest"],
        "reward": 1.0,
        "correct": True,
        "extracted": "2",
        "answer": "2",
        "error": None,
        "prompt_length": 3,
        "length": len(said),
        "finish_reason": "stop",
        "acceptance_length": 2.333,
        "prompt": "1+1",
        "response": "=2\n#### 2</s>",
        "cut": {},
    }


def test_every_task_has_its_own_and_long_texts_are_cut(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["1+1=2"], 104, tmp_path)
    ones = tokenizer.encode("1" * 30)
    responses = [
        scored(0, 0, 4, Reward(1.0, True)),
        scored(0, 1, 5, Reward(0.0, False, error="no answer within 5 s" * 3)),
        scored(1, 0, 9, Reward(0.25, False, "\ud800"), "length"),
        scored(1, 1, len(ones), Reward(0.5, False)),
    ]
    batch = batch_of(ones[:4], ones[:5], ones[:9], ones)
    rows = SampleRows(tokenizer, 2, 20).rows(TRAIN, PROBLEMS, responses, batch)
    assert [(row["task"], row["sample"], row["chosen"]) for row in rows] == [
        ("openai/gsm8k", 1, ["best"]),
        ("openai/gsm8k", 0, ["worst"]),
        ("sums", 0, ["best"]),
        ("sums", 1, ["worst"]),
    ]
    assert rows[0]["cut"] == {"response": 10} and "[... 10 characters left out ...]" in rows[0]["response"]
    assert rows[0]["answer"] is None and rows[1]["extracted"] == "?" and rows[1]["finish_reason"] == "length"
    assert rows[3]["cut"] == {"error": 40} and rows[3]["length"] == 5
    assert [json.loads(dumps(row).encode("utf-8")) for row in rows] == rows
    assert SampleRows(tokenizer, 0, 20).rows(TRAIN, PROBLEMS, responses, batch) == []


def test_only_what_is_chosen_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = train_tokenizer(["1+1=2"], 104, tmp_path)
    decoded: list[list[int]] = []
    monkeypatch.setattr(tokenizer, "decode", lambda ids, special_tokens: decoded.append(ids) or "")
    responses = [scored(0, i, i + 1, Reward(float(i), False)) for i in range(50)]
    batch = batch_of(*([7] * (i + 1) for i in range(50)))
    rows = SampleRows(tokenizer, 3, 20).rows(TRAIN, PROBLEMS, responses, batch)
    assert [row["sample"] for row in rows] == [49, 0] and len(decoded) == 4

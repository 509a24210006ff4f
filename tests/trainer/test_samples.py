"""What a row of samples.jsonl says of a response."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_tlt.data.tokenizer_training import train_tokenizer
from megatron_tlt.observe.jsonl import dumps
from megatron_tlt.observe.samples import TRAIN
from megatron_tlt.rewards.types import Reward
from megatron_tlt.rollout.types import DraftStats, Response
from megatron_tlt.tasks.types import Problem
from megatron_tlt.trainer.experience import ScoredResponse
from megatron_tlt.trainer.samples import SampleRows

PROBLEMS = [Problem("sums/0", "sums", "1+1", "2", "math"), Problem("openai/gsm8k/0", "openai/gsm8k", "2+2", "", "math")]


def scored(problem: int, sample: int, tokens: list[int], reward: Reward, finish: str = "stop") -> ScoredResponse:
    response = Response("x", (5, 6), tuple(tokens), (), finish, 0.0, DraftStats(num_steps=2, num_tokens=3))
    return ScoredResponse(problem, sample, response, reward)


def test_rows_are_what_was_asked_and_said(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["1+1=2"], 104, tmp_path)
    prompt, said = tokenizer.encode("1+1"), [*tokenizer.encode("=2\n#### 2"), tokenizer.eos_id]
    draft = DraftStats(num_steps=3, num_tokens=7)
    response = Response("0-1", tuple(prompt), tuple(said), (), "stop", 0.0, draft)
    (row,) = SampleRows(tokenizer, 3, 100).rows(
        TRAIN, PROBLEMS, [ScoredResponse(0, 1, response, Reward(1.0, True, "2"))]
    )
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
        scored(0, 0, ones[:4], Reward(1.0, True)),
        scored(0, 1, ones[:5], Reward(0.0, False, error="no answer within 5 s" * 3)),
        scored(1, 0, ones[:9], Reward(0.25, False, "\ud800"), "length"),
        scored(1, 1, ones, Reward(0.5, False)),
    ]
    rows = SampleRows(tokenizer, 2, 20).rows(TRAIN, PROBLEMS, responses)
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
    assert SampleRows(tokenizer, 0, 20).rows(TRAIN, PROBLEMS, responses) == []


def test_only_what_is_chosen_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = train_tokenizer(["1+1=2"], 104, tmp_path)
    decoded: list[list[int]] = []
    monkeypatch.setattr(tokenizer, "decode", lambda ids, special_tokens: decoded.append(ids) or "")
    responses = [scored(0, i, [7] * (i + 1), Reward(float(i), False)) for i in range(50)]
    rows = SampleRows(tokenizer, 3, 20).rows(TRAIN, PROBLEMS, responses)
    assert [row["sample"] for row in rows] == [49, 0] and len(decoded) == 4

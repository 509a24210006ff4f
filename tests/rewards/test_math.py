"""math-verify on hand-made responses and on GSM8K's real answers."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from megatron_tlt.config.task import TaskConfig
from megatron_tlt.errors import ConfigError
from megatron_tlt.rewards import RewardPool, verifiers_of
from megatron_tlt.rewards.maths import verify
from megatron_tlt.tasks.files import FileParams, read_rows
from megatron_tlt.tasks.types import Problem

REPOSITORY = Path(__file__).resolve().parents[2]
GSM8K = Path(os.environ.get("TLT_GSM8K", REPOSITORY.parent / "shared" / "data" / "gsm8k")) / "train.jsonl"
SAMPLE = 400


def _problem(answer: str, uid: str = "p") -> Problem:
    return Problem(uid=uid, source="s", prompt="?", answer=answer, verifier="math")


@pytest.mark.parametrize(
    ("answer", "response", "correct"),
    [
        ("72", "#### 72", True),
        ("72", "#### $72.00", True),
        ("72", r"so \boxed{\frac{144}{2}}", True),
        ("72", r"#### \frac{144}{2}", True),
        ("72", "therefore it is 72", True),
        ("1/2", "#### 0.5", True),
        (r"\frac{1}{2}", "#### 1/2", True),
        ("1,000", "#### 1000", True),
        ("1000", "#### 1,000", True),
        (r"x^2+2x+1", r"\boxed{(x+1)^2}", True),
        ("x^2+2x+1", "#### 1", False),
        ("x^2+2x+1", "#### x^2+2x+2", False),
        ("72", "#### 71", False),
        ("72", "first 72 #### 71", False),
        ("72", "", False),
        ("72", "#### ", False),
        ("72", "nothing to see", False),
        ("72", "#### -72", False),
        ("72", "#### " + "(" * 300, False),
        ("72", "\\boxed{" + "(" * 20_000 + "72" + ")" * 20_000 + "}", False),  # too long to be parsed
        ("72", "\\boxed{\ud83d\udd25}".encode("utf-16", "surrogatepass").decode("utf-16"), False),
    ],
)
def test_verdicts(answer: str, response: str, correct: bool) -> None:
    reward = verify(_problem(answer), response)
    assert (reward.value, reward.correct, reward.error) == (float(correct), correct, None)


@pytest.mark.skipif(not GSM8K.is_file(), reason=f"GSM8K is not at {GSM8K}; set TLT_GSM8K to its folder")
def test_gsm8k_rows_all_load() -> None:
    rows = read_rows(GSM8K, FileParams())
    assert len(rows) == sum(1 for line in GSM8K.open(encoding="utf-8") if line.strip())
    for row in rows:
        assert row.solution is not None and "<<" not in row.solution
        assert row.solution.endswith(f"#### {row.answer}")


@pytest.mark.skipif(not GSM8K.is_file(), reason=f"GSM8K is not at {GSM8K}; set TLT_GSM8K to its folder")
def test_gsm8k_reference_solutions_are_right_and_perturbed_ones_wrong() -> None:
    lines = GSM8K.read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["answer"] for line in lines[:: len(lines) // SAMPLE]]
    with RewardPool(workers=2, timeout_s=30.0, verifiers=["math"]) as pool:
        for number, text in enumerate(texts):
            answer = text.rpartition("####")[2].strip()
            # Another way of writing it, so that math-verify decides and not the comparison of texts.
            written = rf"the answer is \boxed{{\frac{{{2 * int(answer.replace(',', ''))}}}{{2}}}}"
            wrong = re.sub(r"\d(?!.*\d)", lambda digit: str((int(digit[0]) + 1) % 10), text)
            for kind, response in (("reference", text), ("written", written), ("wrong", wrong)):
                pool.submit((number, kind), _problem(answer, str(number)), response)
        rewards = pool.collect()
        assert pool.counts.errors == pool.counts.timeouts == pool.counts.deaths == 0
    assert len(rewards) == 3 * len(texts) >= 3 * SAMPLE
    misjudged = [key for key, reward in rewards.items() if reward.correct == (key[1] == "wrong")]
    assert not misjudged


def test_verifiers_of_names_the_key_of_an_unknown_one(tmp_path: Path) -> None:
    file = TaskConfig(kind="file", name="f", path=tmp_path / "f.jsonl")
    assert verifiers_of([TaskConfig(name="gcd"), file]) == ["math", "reasoning_gym"]
    with pytest.raises(
        ConfigError, match=r"tasks\[1\]\.verifier: unknown verifier 'maths'; allowed for kind file: code, math"
    ):
        verifiers_of([file, file.model_copy(update={"verifier": "maths"})])

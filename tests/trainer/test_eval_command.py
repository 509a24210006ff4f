"""``tlt eval`` on a real run: what it evaluated is what it says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megatron_tlt.observe.jsonl import read_jsonl
from tests.helpers.launch import run_logged
from tests.trainer.conftest import Runs

pytestmark = pytest.mark.distributed


def evaluate(runs: Runs, name: str, *arguments: str, expect_status: int = 0) -> str:
    command = runs.command(name, *arguments, command="eval")
    return run_logged(command, timeout_s=600, expect_status=expect_status)


def test_the_newest_checkpoint_is_evaluated_and_named(runs: Runs, uninterrupted: Path) -> None:
    out = runs.folder / "eval.json"
    chosen, own = runs.folder / "chosen.jsonl", (uninterrupted / "samples.jsonl").read_bytes()
    said = evaluate(runs, "uninterrupted", "evaluation.problems=6", "--json", str(out), "--samples", str(chosen))
    newest = uninterrupted / "checkpoints" / "step_000004"
    assert f"evaluated {newest} (after step 4)\non 6 problems, held-out problems of chain_sum, gcd: pass@1 " in said
    found = json.loads(out.read_text())
    assert (found["checkpoint"], found["step"], found["problems"], found["samples"]) == (str(newest), 4, 6, 2)

    rows = read_jsonl(chosen)
    assert {(row["step"], row["origin"], row["task"]) for row in rows} == {
        (4, "evaluation", task) for task in ("chain_sum", "gcd")
    }
    assert found["pass_at_1_by_task"].keys() == {"chain_sum", "gcd"}

    # the figure is that of the run itself, where the run asked the same, and so are the responses
    evaluate(runs, "uninterrupted", "--json", str(out), "--samples", str(chosen))
    last = [row for row in read_jsonl(uninterrupted / "samples.jsonl") if row["step"] == 4]
    assert read_jsonl(chosen) == [row for row in last if row["origin"] == "evaluation"]
    assert (uninterrupted / "samples.jsonl").read_bytes() == own, "the run's own are left alone"
    at_the_end = json.loads((uninterrupted / "summary.json").read_text())["eval"]["end"]
    assert json.loads(out.read_text())["pass_at_1"] == at_the_end["pass_at_1"]


def test_a_step_or_a_folder_may_be_named_and_a_file_answered(runs: Runs, uninterrupted: Path) -> None:
    data = runs.folder / "questions.jsonl"
    data.write_text("".join(json.dumps({"question": f"{n}+1", "answer": f"#### {n + 1}"}) + "\n" for n in range(3)))
    out = runs.folder / "on-file.json"
    said = evaluate(runs, "uninterrupted", "--checkpoint", "3", "--data", str(data), "--json", str(out))
    assert f"step_000003 (after step 3)\non 3 problems, {data}: pass@1 " in said
    assert json.loads(out.read_text())["data"] == str(data)

    copied = shutil.copytree(uninterrupted / "checkpoints" / "step_000003", runs.folder / "copied")
    assert f"evaluated {copied} (after step 3)" in evaluate(runs, "uninterrupted", "--checkpoint", str(copied))


def test_what_is_not_there_is_refused(runs: Runs, uninterrupted: Path) -> None:
    said = evaluate(runs, "uninterrupted", "--checkpoint", "17", expect_status=2)
    assert "--checkpoint: " in said and "step_000017 is not a checkpoint" in said and "step_000004" in said
    said = evaluate(runs, "uninterrupted", "--data", str(runs.folder / "none.jsonl"), expect_status=2)
    assert "none.jsonl" in said
    long = runs.folder / "long.jsonl"
    long.write_text(json.dumps({"question": "1+" * 60, "answer": "#### 60"}) + "\n")
    said = evaluate(runs, "uninterrupted", "--data", str(long), expect_status=2)
    assert f"error: {long}:1: its prompt has " in said and "allowed by rollout.max_prompt_tokens: 48" in said


def test_without_a_checkpoint_it_says_that_it_evaluates_the_start(runs: Runs, uninterrupted: Path) -> None:
    said = evaluate(runs, "never-trained")
    assert "evaluated the start model " in said and "the run has no checkpoint" in said

"""What the record of a run says of a run that cannot learn, or whose drafter is silent."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from megatron_tlt.config.schema import TltConfig
from megatron_tlt.observe.jsonl import read_jsonl
from megatron_tlt.observe.lasting_causes import STEPS
from megatron_tlt.observe.learning_check import LearningCheck
from megatron_tlt.observe.metrics import read_metrics
from megatron_tlt.observe.progress import Progress
from megatron_tlt.observe.report import write_report
from megatron_tlt.observe.timeline import Timeline
from megatron_tlt.trainer.evaluation import Evaluation
from megatron_tlt.trainer.record import RunRecord
from megatron_tlt.trainer.step import StepResult

UNTAUGHT = {"reward/mixed_groups": 0.0, "reward/correct": 0.0, "reward/extracted": 0.0, "length/truncated": 0.1}


def _config(**observe: int) -> TltConfig:
    sections = {"tasks": [{"name": "chain_sum"}], "observe": {"tensorboard": False, **observe}}
    return TltConfig.model_validate({"model": {"recipe": {}}, **sections})


def _record(folder: Path, done: int, steps: range, metrics: Mapping[str, float] = UNTAUGHT, **observe: int) -> None:
    """Records these steps, all with the same metrics, by default of a run that learns nothing."""
    with (
        RunRecord(folder, _config(**observe), done, Timeline(0, folder)) as record,
        Progress(0, 20, enabled=False) as progress,
    ):
        for step in steps:
            result = StepResult(metrics=dict(metrics), samples=[{"origin": "train", "response": f"from {done}"}])
            record.step(step, result, progress)


def test_a_run_says_it_on_the_terminal_once_also_over_a_resume_and_in_metrics_and_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _record(tmp_path, 0, range(1, STEPS + 2))
    assert capsys.readouterr().err.count("warning: no learning for") == 1, "also without progress"
    _record(tmp_path, STEPS + 1, range(STEPS + 2, STEPS + 4))
    assert "warning" not in capsys.readouterr().err
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["learning/warnings"] for row in rows] == [0.0] * (STEPS - 1) + [1.0] * 4
    assert len(LearningCheck().of_run(rows)) == 1
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert page.count(f"Step {STEPS}: no learning for") == 1


def test_a_silent_drafter_is_said_once_also_over_a_resume_and_counted_in_the_metrics(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    untrained = {"drafter/version": 0.0, "drafter/entries": 0.0}
    _record(tmp_path, 0, range(1, STEPS), untrained)
    assert "warning" not in capsys.readouterr().err
    _record(tmp_path, STEPS - 1, range(STEPS, STEPS + 3), untrained)
    assert capsys.readouterr().err.count("warning: the drafter has never been trained: no rank's buffer") == 1
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["speculation/warnings"] for row in rows] == [0.0] * (STEPS - 1) + [1.0] * 3


def test_an_evaluation_joins_its_steps_row_or_makes_one(tmp_path: Path) -> None:
    """A kill between a checkpoint and its row, or an older release, leaves a checkpoint without a row."""
    _record(tmp_path, 0, range(1, 3))
    evaluation = Evaluation(0.5, 0.75, None, 0.8, None, 8, 2, {"chain_sum": 0.5}, {"harder": {"pass_at_1": 0.25}})
    with RunRecord(tmp_path, _config(), 3, Timeline(0, tmp_path)) as record:
        record.evaluation(3, evaluation, 1.0)
        record.evaluation(2, evaluation, 2.0)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row.get("eval/pass_at_1") for row in rows] == [None, 0.5, 0.5]
    assert rows[1]["length/truncated"] == 0.1 and rows[1]["time/evaluate"] == 2.0
    assert rows[1]["task/chain_sum/eval_pass_at_1"] == 0.5 and "eval/greedy" not in rows[1]
    assert rows[1]["eval/best_of_k"] == 0.8 and rows[1]["eval/harder/pass_at_1"] == 0.25


def test_samples_of_steps_that_are_done_again_are_there_once_also_where_no_more_are_written(tmp_path: Path) -> None:
    def found() -> list[tuple[int, str]]:
        return [(row["step"], row["response"]) for row in read_jsonl(tmp_path / "samples.jsonl")]

    _record(tmp_path, 0, range(1, 4))
    _record(tmp_path, 2, range(3, 5))
    assert found() == [(1, "from 0"), (2, "from 0"), (3, "from 2"), (4, "from 2")]
    _record(tmp_path, 1, range(2, 3), samples_per_task=0)
    assert [step for step, _ in found()][:1] == [1] and (3, "from 2") not in found()
    _record(tmp_path / "off", 0, range(1, 3), samples_per_task=0)
    assert not (tmp_path / "off" / "samples.jsonl").exists()

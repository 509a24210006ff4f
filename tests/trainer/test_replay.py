"""A run of the real actor on recorded responses, without vLLM: it ends where the run that was recorded ended."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.helpers.launch import REPOSITORY, run_logged
from tests.trainer.conftest import Runs, rows_of

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(1800)]  # two runs from nothing

MODULE = "tlt_recorded_engines"
SOURCE = """
import json
import os
import sys
from pathlib import Path

from megatron_tlt.rollout.replay import ReplayEngine


class Replayed(ReplayEngine):
    def __init__(self, *given, path, imported):
        super().__init__(*given, path=path)
        self._imported = Path(imported, f"imported-by-{os.environ['RANK']}.json")

    def shutdown(self):
        roots = {name.partition(".")[0] for name in sys.modules}
        self._imported.write_text(json.dumps(sorted(roots)))
"""


def test_a_replayed_run_ends_with_the_weights_of_the_recorded_one_and_imports_no_vllm(
    runs: Runs, tmp_path: Path
) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / f"{MODULE}.py").write_text(SOURCE)
    environment = {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(code)])}

    runs.train("recorded", "observe.recording=true", "trainer.keep_checkpoints=4")
    recorded = runs.folder / "recorded"
    recording = recorded / "recording"
    without = ("rollout.vllm=null", "speculation.enabled=false", "reshard.method=none")
    arguments = {"path": str(recording), "imported": str(tmp_path)}
    given = (f"rollout.engine={MODULE}.Replayed", f"rollout.engine_arguments={json.dumps(arguments)}", *without)
    run_logged(runs.command("replayed", *given, fresh=True), timeout_s=900, env=environment)
    replayed = runs.folder / "replayed"

    assert (replayed / "hf" / "model.safetensors").read_bytes() == (recorded / "hf" / "model.safetensors").read_bytes()
    ours, theirs = rows_of(replayed), rows_of(recorded)
    assert len(ours) == 4 and all((row["actor/grad_norm"] or 0) > 1e-3 for row in ours), "equal bits would show nothing"
    for name in ("actor/loss", "reward/mean", "length/mean", "length/truncated", "mismatch/mean_abs"):
        assert [row[name] for row in ours] == [row[name] for row in theirs], name
    assert not any(name.startswith("eval/") for row in ours for name in row)
    summary = json.loads((replayed / "summary.json").read_text())
    assert summary["rollout"]["backend"] == f"{MODULE}.Replayed" and summary["eval"] == {}
    assert summary["reshard"]["tensors"] == 0
    for rank in range(2):
        imported = json.loads((tmp_path / f"imported-by-{rank}.json").read_text())
        assert "vllm" not in imported and {"megatron", "torch"} <= set(imported)

    said = run_logged(
        runs.command("replayed", *given, command="eval"),
        timeout_s=300,
        env=environment,
        expect_status=2,
    )
    assert "which takes no weights; allowed for an evaluation" in said

    fresh, repeat = (
        [*runs.command("recorded", fresh=fresh, command="replay")[:3], "replay", str(recorded)]
        for fresh in (True, False)
    )
    said = run_logged([*fresh, "--step", "3"], timeout_s=600)
    again = runs.folder / "recorded+step-3"
    assert "from the checkpoint of step 2" in said and "differs" not in said and said.count("equal") >= 5
    (row,) = (row for row in rows_of(again))
    assert row["step"] == 3 and row["actor/grad_norm"] == ours[2]["actor/grad_norm"]
    assert (recorded / "checkpoints" / "latest").read_text() == "step_000004\n", "the run itself is as it was"
    said = run_logged([*repeat, "algorithm.clip_low=0.1", "--step", "3", "--out", str(tmp_path / "o")], timeout_s=600)
    assert "equal" in said, "with other settings"
    for arguments, reason in {
        ("--step", "5"): "--step: found 5; allowed: 1 to 4",
        ("--step", "3"): "is not an empty folder",
        ("algorithm.clip_loww=1", "--step", "2"): "algorithm.clip_loww",
    }.items():
        assert reason in run_logged([*repeat, *arguments], timeout_s=60, expect_status=2)
    assert not (runs.folder / "recorded+step-2").exists()
    assert "holds no run" in run_logged([*repeat[:4], str(tmp_path), "--step", "1"], timeout_s=60, expect_status=2)


def rows_by_request(folder: Path) -> dict[tuple[str, int], list[int]]:
    rows = [json.loads(line) for file in sorted(folder.glob("rank_*.jsonl")) for line in file.read_text().splitlines()]
    return {(str(row["prompt_token_ids"]), row["seed"]): row["token_ids"] for row in rows}


def test_nothing_is_trained_in_the_wait_of_a_rollout_alone(runs: Runs, tmp_path: Path) -> None:
    drafter = ("drafter.kind=eagle", "speculation.drafter=eagle", "speculation.num_speculative_tokens=2")
    bubble = ("run.deterministic=false", *drafter, "spot.min_entries=1", "stream={}")
    command = [*runs.command("waiting", *bubble, command="rollout"), "--out", str(tmp_path / "out"), "--steps", "2"]
    assert "rollout of step 2: 16 responses, reward " in run_logged(command, timeout_s=300)
    assert not (runs.folder / "waiting" / "drafter" / "spot").exists()


def test_a_rollout_alone_records_what_the_first_steps_of_training_would_sample(runs: Runs, tmp_path: Path) -> None:
    out = tmp_path / "recorded"
    said = run_logged(
        [*runs.command("alone", fresh=True, command="rollout"), "--out", str(out), "--steps", "2"], timeout_s=300
    )
    assert "rollout of step 1: 16 responses, reward " in said and f"recorded: {out}" in said
    assert not (runs.folder / "alone" / "metrics.jsonl").exists() and not (runs.folder / "alone" / "hf").exists()
    found = rows_by_request(out)
    assert len(found) == 2 * 16
    runs.train("recorded-two", "observe.recording=true", "trainer.steps=1")
    trained = rows_by_request(runs.folder / "recorded-two" / "recording")
    assert len(trained) == 16 and trained.items() <= found.items()
    again = [*runs.command("alone", command="rollout"), "--out", str(out)]
    assert "is not an empty folder" in run_logged(again, timeout_s=60, expect_status=2)

    arguments = json.dumps({"path": str(out)})
    without = ("rollout.vllm=null", "speculation.enabled=false", "reshard.method=none", "trainer.steps=1")
    runs.train("train-only", "rollout.engine=replay", f"rollout.engine_arguments={arguments}", *without)
    weights = [(runs.folder / name / "hf/model.safetensors").read_bytes() for name in ("train-only", "recorded-two")]
    assert weights[0] == weights[1]

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

from megatron_tlt.rollout.replay import ReplayEngine, append_recording
from megatron_tlt.rollout.vllm_engine import VllmEngine


class Recorder(VllmEngine):
    def __init__(self, model_path, rollout, speculation, seed, *, folder):
        super().__init__(model_path, rollout, speculation, seed)
        self._file = Path(folder, f"rank{os.environ['RANK']}.jsonl")

    def generate(self, requests, *others):
        responses = super().generate(requests, *others)
        append_recording(self._file, requests, responses)
        return responses


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

    def train(name: str, engine: str, arguments: dict[str, str], *overrides: str) -> Path:
        given = f"rollout.engine_arguments={json.dumps(arguments)}"
        command = runs.command(name, f"rollout.engine={MODULE}.{engine}", given, *overrides)
        run_logged(command, timeout_s=900, env=environment)
        return runs.folder / name

    recorded = train("recorded", "Recorder", {"folder": str(tmp_path)})
    recording = tmp_path / "recording.jsonl"
    recording.write_text("".join((tmp_path / f"rank{rank}.jsonl").read_text() for rank in range(2)))
    without = ("rollout.vllm=null", "speculation.enabled=false", "reshard.method=none")
    arguments = {"path": str(recording), "imported": str(tmp_path)}
    replayed = train("replayed", "Replayed", arguments, *without)

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
        # the module also imports the recorder's base class, whose own module imports vLLM only when an engine is built
        assert "vllm" not in imported and {"megatron", "torch"} <= set(imported)

    said = run_logged(
        runs.command(
            "replayed",
            f"rollout.engine={MODULE}.Replayed",
            f"rollout.engine_arguments={json.dumps(arguments)}",
            *without,
            command="eval",
        ),
        timeout_s=300,
        env=environment,
        expect_status=2,
    )
    assert "which takes no weights; allowed for an evaluation" in said

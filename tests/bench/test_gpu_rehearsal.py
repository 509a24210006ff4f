"""Each part of the measurement command for one GPU runs on a CPU, with small shapes on the real libraries."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.bench.test_gpu_measure import CPU, PARTS, ROOT
from tests.helpers.triton_interpreter import TRITON


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """Runs a part, and again: the second run has nothing to add."""

    def rehearse(part: str) -> list[dict[str, Any]]:
        command = [sys.executable, "-m", "tools.bench.gpu_measure", part, "--small"]
        command += ["--out", str(tmp_path), "--repeats", "1"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, f"{done.stdout[-6000:]}{done.stderr[-2000:]}"
        found = json.loads((tmp_path / f"{part}.json").read_text())
        assert found["environment"]["vllm"] and found["environment"]["date"]
        names = [one.name for one in PARTS[part].measurements(CPU)]
        assert list(dict.fromkeys(row["measurement"] for row in found["rows"])) == names
        assert all(row["rehearsal"] for row in found["rows"] if "unavailable" not in row)
        assert {entry["op"] for entry in found["targets"].values()} == {"incomplete"}
        assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 0
        assert json.loads((tmp_path / f"{part}.json").read_text())["rows"] == found["rows"]
        rows: list[dict[str, Any]] = found["rows"]
        return rows

    return rehearse


@pytest.mark.slow(60)
def test_smoke(run: Any) -> None:
    assert {row["equal_share"] for row in run("smoke") if "equal_share" in row} == {1.0}


@pytest.mark.slow(60)
def test_steps(run: Any) -> None:
    rows = run("steps")
    assert not any("equal_share" in row for row in rows)
    drafts = {(row["measurement"], row["drafts"]) for row in rows if "milliseconds" in row}
    assert {("V1 off", 0), ("V1 full", 3)} <= drafts


@pytest.mark.slow(300)
def test_rollout(run: Any) -> None:
    rows = run("rollout")
    assert {row["on_chain"] for row in rows if "on_chain" in row} == {1.0}
    unavailable = {row["arm"] for row in rows if "unavailable" in row}
    second = {row["arm"]: row for row in rows if row["arm"].startswith("V2")}
    assert set(second) == {"V2 off", "V2 tuner", "V2 eagle3-3"}
    if not (TRITON / "triton").is_dir():
        assert unavailable == {"stock adaptive", *second}
        pytest.skip(f"the second model runner was not rehearsed: no triton in {TRITON}; tests/run.sh --all installs it")
    assert unavailable == {"stock adaptive"}
    assert {row["runner"] for row in second.values()} == {"v2"}
    assert second["V2 eagle3-3"]["acceptance_length"] > 1.2, "the set acceptance, whatever the head drafts"


@pytest.mark.slow(200)
def test_colocate(run: Any) -> None:
    rows = run("colocate")
    phases = {row["phase"] for row in rows}
    assert {"log-probs", "update", "offload", "engine asleep", "engine awake", "reshard", "drafter step"} <= phases
    assert [(row["step"], row["resumed"]) for row in rows if row["phase"] == "step"] == [
        (1, False),
        (2, False),
        (3, True),
    ]


@pytest.mark.slow(300)
def test_learn(run: Any) -> None:
    """With the quickstart's model in place of SmolLM2."""
    rows = run("learn")
    assert "targets" in rows[-1]
    assert any("batch" in row for row in rows)

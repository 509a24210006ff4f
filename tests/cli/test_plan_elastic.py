"""``tlt plan --elastic`` and ``tlt simulate --failures``: figures for a launch config, without heavy libraries."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_tlt.cli import main
from megatron_tlt.config.layouts import Layout, problems
from megatron_tlt.config.loader import load_config
from megatron_tlt.config.source import deep_merge
from megatron_tlt.models.architecture import sizes_of
from megatron_tlt.planning.model_size import ModelSize
from tests.helpers.launch import REPOSITORY

LARGE = "launch/qwen2.5-32b-4n8g.yaml"


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)  # the config names its architecture from there
    monkeypatch.setenv("COLUMNS", "140")


def _figures(tmp_path: Path, command: str, *arguments: str) -> dict[str, Any]:
    file = tmp_path / "figures.json"
    assert main([command, LARGE, *arguments, "--json", str(file)]) == 0
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_sizes_and_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = _figures(tmp_path, "plan", "--elastic", "--devices", "H100-80GB")
    # the states of 32B do not fit on one node
    assert [size["nodes"] for size in found["sizes"]] == [2, 3, 4, 8]
    config = load_config(Path(LARGE), check_libraries=False)
    shape = ModelSize.of(sizes_of(config)[0]).shape
    for size in found["sizes"]:
        launcher = size["config"]["launcher"]
        world = launcher["nnodes"] * launcher["nproc_per_node"]
        megatron = deep_merge(dict(config.actor.megatron), size["config"]["actor"]["megatron"])
        layout = Layout.read(megatron, world)
        assert str(layout) == size["actor"] and layout.tp == 8 and not problems(layout, shape)
        assert world == size["used"] == 8 * size["nodes"] - size["idle"]
    assert {change["way"] for change in found["changes"]} == {"disk", "snapshots", "forks"}
    printed = " ".join(capsys.readouterr().out.split())
    for word in ("computed", "2 to 4", "4 to 8", "2407.21783", "assumed until measured"):
        assert word in printed


def test_a_given_stall_and_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--reconfigure-s", "1000", "--mtbf-hours-per-device", "1", "--strict", "--logical-shards", "4"]
    found = _figures(tmp_path, "plan", "--elastic", "--devices", "H100-80GB", *options)
    assert {change["way"] for change in found["changes"]} == {"given"}
    assert not any(change["pays"] for change in found["changes"])
    assert "assumed" not in capsys.readouterr().out.split("fails once")[1]


def test_effective_training_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "plot.svg"
    options = ["--failures", "--devices-list", "64", "256", "--runs", "4", "--constant", "replacement_s=7200"]
    found = _figures(tmp_path, "simulate", *options, "--plot", str(plot))
    assert list(found["sizes"]) == ["64", "256"]
    assert found["constants"]["replacement_s"] == {"value": 7200.0, "source": "given"}
    for size in found["sizes"].values():
        speeds = size["speed_by_missing_nodes"]
        assert speeds[0] == 1.0 and speeds == sorted(speeds, reverse=True)
        names = [(row["recovery"]["name"], row["recovery"]["shrinks"]) for row in size["mechanisms"]]
        assert names == [(name, way) for name in ("disk", "snapshots", "forks") for way in (False, True)]
        for row in size["mechanisms"]:
            assert 0.0 < row["rate_double"]["mean"] <= row["now"]["mean"] <= row["rate_half"]["mean"] <= 1.0
            assert (row["exact"] is None) == row["recovery"]["shrinks"]
    assert found["sizes"]["64"]["step_s"] == pytest.approx(found["sizes"]["256"]["step_s"], rel=0.2)
    printed = " ".join(capsys.readouterr().out.split())
    for word in ("projection", "assumed", "disk, waits", "forks, shrinks", "replacement_s 7200: given"):
        assert word in printed
    drawn = plot.read_text()
    assert "<svg" in drawn and "effective training time ratio" in drawn
    again = _figures(tmp_path, "simulate", *options)
    assert again == found


@pytest.mark.parametrize(
    "command, options, message",
    [
        ("plan", ["--elastic", "--reconfigure-s", "0"], "--reconfigure-s: found 0; allowed: above 0"),
        ("plan", ["--elastic", "--mtbf-hours-per-device", "-1"], "--mtbf-hours-per-device: found -1"),
        ("plan", ["--elastic", "--logical-shards", "4"], "--logical-shards: found without --strict"),
        ("plan", ["--elastic", "--strict", "--logical-shards", "3"], "logical_shards: found 3"),
        ("plan", ["--elastic", "--devices", "L4-24GB"], "32 device(s) on 4 node(s): no layout with TP8"),
        ("simulate", ["--failures", "--devices-list", "60"], "--devices-list: found 60; allowed: multiples of"),
        ("simulate", ["--failures", "--days", "0"], "--days: found 0; allowed: above 0"),
        ("simulate", ["--failures", "--runs", "0"], "--runs: found 0; allowed: at least 1"),
        ("simulate", ["--failures", "--constant", "disk=1"], "--constant: found 'disk' with --failures; allowed: dev"),
        ("simulate", ["--failures", "--constant", "disk_s"], "--constant: found 'disk_s'; allowed: NAME=VALUE"),
        ("simulate", ["--failures", "--constant", "node_lost=2"], "--constant: node_lost is 2; allowed: 0 to 1"),
        ("simulate", ["--failures", "--constant", "disk_s=-1"], "--constant: disk_s is -1; allowed: at least 0"),
        ("simulate", ["--failures", "--plot", "a.txt"], "--plot: found a.txt; allowed: one of the extensions"),
    ],
)
def test_errors_name_the_option(
    command: str, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, LARGE, *options]) == 2
    assert message in capsys.readouterr().err


def test_neither_imports_a_heavy_library() -> None:
    code = (
        "import sys; from megatron_tlt.cli import main\n"
        f"status = main(['plan', {LARGE!r}, '--elastic', '--devices', 'H100-80GB'])\n"
        f"status += main(['simulate', {LARGE!r}, '--failures', '--devices-list', '64', '--runs', '1'])\n"
        "print({'torch', 'transformers', 'vllm', 'megatron'} & set(sys.modules))\n"
        "sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "set()"

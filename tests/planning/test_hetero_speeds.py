"""The section ``speeds`` that ``tlt plan --cluster`` prints and writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from megatron_tlt.cli import main
from megatron_tlt.config.layouts import Layout
from megatron_tlt.config.loader import load_config
from megatron_tlt.config.speeds import engines_of, of_devices, replicas_of, shares_of, slowest_of
from megatron_tlt.planning.hetero.balance import Curve
from megatron_tlt.planning.hetero.speeds import engine_speeds
from tests.helpers.launch import REPOSITORY

SMALL = REPOSITORY / "launch" / "qwen2.5-7b-2n8g.yaml"
LINKS = "links: [{between: ['*', '*'], latency_us: 8, bandwidth: 50}]\n"


def planned(folder: Path, nodes: str, capsys: pytest.CaptureFixture[str]) -> tuple[str, dict[str, object], Path]:
    """What was printed, the JSON, and the written config."""
    cluster, figures, launch = (folder / name for name in ("cluster.yaml", "plan.json", "launch.yaml"))
    cluster.write_text(f"nodes: [{nodes}]\n{LINKS}")
    command = ["plan", str(SMALL), "--cluster", str(cluster), "--evaluations", "40"]
    assert main([*command, "--json", str(figures), "--write", str(launch)]) == 0
    return capsys.readouterr().out, json.loads(figures.read_text()), launch


def test_the_key_is_printed_and_written_and_divides_as_the_plan_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = "{name: a, devices: [{device: H100-80GB, count: 8}]}, {name: b, devices: [{device: L40S-48GB, count: 8}]}"
    printed, figures, launch = planned(tmp_path, nodes, capsys)
    (line,) = (line for line in printed.splitlines() if line.startswith("speeds: "))
    found = yaml.safe_load(line)["speeds"]
    assert found == figures["speeds"]
    config = load_config(launch, check_libraries=False)
    assert config.speeds is not None and config.speeds.model_dump(mode="json") == found
    today = figures["runs_today"]
    assert isinstance(today, dict) and today["step_seconds"] < figures["even_shares_seconds"]
    world, tp = config.launcher.world_size, config.rollout.tensor_parallel_size
    groups = {
        "rollout": engines_of(world, tp),
        "actor": replicas_of(world, Layout.read(config.actor.megatron, world)),
    }
    for task in today["tasks"]:
        if task["name"] in groups:
            total = sum(row["share"] for row in task["replicas"])
            speeds = slowest_of(groups[task["name"]], of_devices(found[task["name"]], 2, 8))
            shares = sorted(speed / sum(speeds) * total for speed in speeds)
            # whole micro-batches and responses
            assert shares == pytest.approx(sorted(row["share"] for row in task["replicas"]), abs=1.1), task["name"]


def test_equal_devices_need_no_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed, figures, launch = planned(
        tmp_path, "{name: a, count: 2, devices: [{device: A100-80GB, count: 8}]}", capsys
    )
    assert figures["speeds"] is None and load_config(launch, check_libraries=False).speeds is None
    assert "speeds:" not in printed and "all replicas and engines of it are equally fast, so shares are even" in printed


@given(st.lists(st.tuples(st.sampled_from([0.01, 0.5, 1.0]), st.integers(0, 200)), min_size=2, max_size=9), st.data())
def test_each_engine_gets_a_problem_and_equal_ones_the_same_speed(
    engines: list[tuple[float, int]], data: st.DataObject
) -> None:
    curves, shares = [Curve(0, slope) for slope, _ in engines], [share for _, share in engines]
    problems = data.draw(st.integers(len(engines), 40))
    if not any(shares):
        shares[0] = 1
    speeds = engine_speeds(curves, shares, problems)
    assert max(speeds) == 1 and 0 not in shares_of(problems, speeds)
    for curve in curves:
        assert len({speed for one, speed in zip(curves, speeds, strict=True) if one == curve}) == 1

"""The graph pool's benchmark: its rows say what they are worth, and without a GPU nothing is called measured."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_tlt.bench import graph_pool
from megatron_tlt.bench.graph_memory import comparison_plans, load_published
from megatron_tlt.bench.workers.graph_memory import read_plan, write_config
from megatron_tlt.speculation.graph_pool import capture_sizes
from megatron_tlt.speculation.strategy import Strategy

ROOT = Path(__file__).parents[2]


def arguments_of(*values: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    graph_pool.add_arguments(parser)
    return parser.parse_args(values)


def test_rows_and_targets() -> None:
    result = graph_pool.run(arguments_of("--measure", "never"))
    rows = {(row["setting"], row["plan"]): row for row in result.rows}
    assert len(rows) == 6
    assert [rows["published", kind]["basis"] for kind in ("single", "naive", "bucketed")] == [
        "fitted",
        "predicted",
        "fitted",
    ]
    assert {rows["chains", kind]["basis"] for kind in ("single", "naive", "bucketed")} == {"predicted"}
    for row in result.rows:
        assert row["graphs"] == row["target"] + row["draft"]
        assert row.get("modelled_tp1_gb", 1e9) > row["modelled_gb"]
    assert rows["published", "bucketed"]["graphs"] < rows["published", "naive"]["graphs"] / 4
    chains = rows["chains", "naive"]["modelled_gb"] / rows["chains", "bucketed"]["modelled_gb"]
    assert result.targets["naive_over_bucketed_modelled_chains"]["value"] == chains
    assert all(rows["chains", kind]["measured_gb"] is None for kind in ("single", "naive", "bucketed"))
    assert "naive_over_bucketed_measured_chains" not in result.targets


def test_a_target_may_be_missed() -> None:
    """Two strategies instead of four leave less to save."""
    result = graph_pool.run(arguments_of("--strategies", "eagle-7", "eagle-3", "--starts", "1", "5"))
    entry = result.targets["naive_over_bucketed_modelled_chains"]
    assert 1 < entry["value"] < 2.8 and not entry["met"]


def test_capture_sizes_are_vllms_grid() -> None:
    assert capture_sizes(20) == (1, 2, 4, 8, 16, 20)
    assert capture_sizes(288)[-4:] == (248, 256, 272, 288)


def test_what_fails_to_measure_is_said_and_a_job_holds_its_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import json, sys\n"
        "job = json.load(open(sys.argv[1]))\n"
        "json.dump(job, open(sys.argv[2] + '.job', 'w'))\n"
        "if job['kind'] == 'naive': sys.exit('out of memory')\n"
        "json.dump({'bytes': 5e9, 'captured': len(job['graphs']), 'seconds': 2.0}, open(sys.argv[2], 'w'))\n"
    )
    monkeypatch.setattr(graph_pool, "WORKER", worker)
    model = load_published().model
    plans = comparison_plans((Strategy("eagle", 3), Strategy("eagle", 1)), (1, 5), 8, (1, 4, 8, 16))
    found = graph_pool._measure(plans["bucketed"], model)
    assert found == {"measured_gb": 5.0, "captured": plans["bucketed"].count(), "capture_s": 2.0}
    failed = graph_pool._measure(plans["naive"], model)
    assert failed == {"measured_gb": None, "not_measured": "status 1: out of memory"}


def test_the_worker_reads_back_the_plan_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = comparison_plans((Strategy("eagle", 3), Strategy("eagle", 1)), (1, 5), 8, (1, 4, 8, 16))["bucketed"]
    kept = tmp_path / "kept.json"
    worker = tmp_path / "worker.py"
    worker.write_text(f"import shutil, sys\nshutil.copy(sys.argv[1], {str(kept)!r})\nsys.exit(1)\n")
    monkeypatch.setattr(graph_pool, "WORKER", worker)
    graph_pool._measure(plan, load_published().model)
    job = json.loads(kept.read_text())
    read = read_plan(job)
    assert (read.graphs, read.strategies, read.kind) == (plan.graphs, plan.strategies, plan.kind)
    assert job["arguments"]["max_num_seqs"] == 16 and "compilation_config" in job["arguments"]
    written = json.loads((write_config(tmp_path / "head", job["model"], 1) / "config.json").read_text())
    assert written["num_hidden_layers"] == 1 and written["hidden_size"] == 4096


@pytest.mark.parametrize("with_python", [True, False], ids=["python", "nothing installed"])
def test_the_gpu_script_never_fails(tmp_path: Path, with_python: bool) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    if with_python:
        (tools / "python3").symlink_to(sys.executable)
    environment = {"PATH": f"{tools}:/usr/bin:/bin" if with_python else str(tools), "HOME": str(tmp_path)}
    for name in ("dirname", "mkdir", "tee", "timeout", "tail", "cut", "mktemp"):
        (tools / name).symlink_to(f"/usr/bin/{name}")
    copy = tmp_path / "tree"
    (copy / "tools" / "bench").mkdir(parents=True)
    (copy / "tools" / "bench" / "gpu.sh").write_text((ROOT / "tools" / "bench" / "gpu.sh").read_text())
    if with_python:
        (copy / "megatron_tlt").symlink_to(ROOT / "megatron_tlt")
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        ["/bin/bash", str(copy / "tools" / "bench" / "gpu.sh"), str(tmp_path / "out")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    summary = (tmp_path / "out" / "summary.txt").read_text()
    if with_python:
        assert "graph-pool: done" in summary
        rows = json.loads((tmp_path / "out" / "graph-pool.json").read_text())["rows"]
        assert {row["plan"] for row in rows} == {"single", "naive", "bucketed"}
    else:
        assert "no python here" in summary

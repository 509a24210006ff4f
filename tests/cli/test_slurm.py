"""The job scripts that users submit, on a real Slurm: two nodes of this machine, one process on each."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.cli.conftest import TwoNodes, steps
from tests.helpers.launch import slowness
from tests.helpers.slurm import SICK_NODE, Slurm

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

LIMIT_S = 600


def submit(slurm: Slurm, two_nodes: TwoNodes, name: str, *options: str) -> tuple[str, Path]:
    """Job and run of a training; it has two nodes."""
    run = two_nodes.folder / name
    return slurm.submit("train.sbatch", two_nodes.arguments(run), "--nodes=2", *options), run


def weights(run: Path) -> bytes:
    return (run / "hf" / "model.safetensors").read_bytes()


@pytest.fixture(scope="session")
def undisturbed(slurm: Slurm, two_nodes: TwoNodes) -> tuple[str, Path]:
    job, run = submit(slurm, two_nodes, "undisturbed")
    state = slurm.wait(job, LIMIT_S)
    assert state["JobState"] == "COMPLETED" and state["ExitCode"] == "0:0", slurm.story(job)
    return job, run


def test_two_nodes_train_and_leave_everything_beside_the_run(slurm: Slurm, undisturbed: tuple[str, Path]) -> None:
    job, run = undisturbed
    summary = json.loads((run / "summary.json").read_text())
    assert summary["world_size"] == 2 and summary["steps"] == 6
    assert summary["eval"]["end"]["pass_at_1"] > summary["eval"]["start"]["pass_at_1"] > 0, summary["eval"]
    assert (run / "drafter" / "newest" / "config.json").is_file()
    output = slurm.output(job)
    assert "n0: all of" in output and "n1: all of" in output, output
    # the script as it ran, what it was given, and the config that this comes to
    assert (run / "slurm" / f"job-{job}.sbatch").read_text().startswith("#!/usr/bin/env bash")
    assert "JobId" in (run / "slurm" / f"job-{job}.0.txt").read_text()
    assert "nnodes: 2" in (run / "slurm" / f"job-{job}.0.config.yaml").read_text()
    assert "nnodes: 2" in (run / "config.resolved.yaml").read_text()
    logs = {file.name for file in (run / "logs" / f"job-{job}.0").iterdir()}
    assert {"rank00000.log", "rank00001.log", "n0.log", "n1.log"} <= logs
    assert "vllm" in (run / "logs" / f"job-{job}.0" / "rank00001.log").read_text().lower()


def test_sigterm_saves_requeues_and_ends_with_the_same_bits(
    slurm: Slurm, two_nodes: TwoNodes, undisturbed: tuple[str, Path]
) -> None:
    job, run = submit(slurm, two_nodes, "requeued")
    deadline = time.monotonic() + LIMIT_S * slowness()
    while steps(run) < 1:
        assert time.monotonic() < deadline and slurm.state(job)["JobState"] != "FAILED", slurm.story(job)
        time.sleep(0.1)
    slurm.run("scancel", "--signal=TERM", job)
    state = slurm.wait(job, LIMIT_S)
    assert state["JobState"] == "COMPLETED" and state["Restarts"] == "1", slurm.story(job)
    output = slurm.output(job)
    assert "stopped by SIGTERM after" in output and "start 2 on 2 node(s)" in output, output
    assert weights(run) == weights(undisturbed[1])
    assert (run / "logs" / f"job-{job}.1" / "rank00001.log").is_file()


def test_a_node_that_fails_its_checks_ends_the_job_and_is_named(slurm: Slurm, two_nodes: TwoNodes) -> None:
    began = time.monotonic()
    job, run = submit(slurm, two_nodes, "sick", "--partition=sick")
    state = slurm.wait(job, 60)
    seconds = time.monotonic() - began
    output = slurm.output(job)
    assert state["JobState"] == "FAILED", slurm.story(job)
    assert f"{SICK_NODE}: FAIL: open files: at most 512; 1024 are needed" in output, output
    assert seconds < 60
    assert not (run / "metrics.jsonl").exists()


def test_a_chain_ends_at_once_where_the_run_is_finished(
    slurm: Slurm, two_nodes: TwoNodes, undisturbed: tuple[str, Path]
) -> None:
    before = weights(undisturbed[1]), (undisturbed[1] / "summary.json").stat().st_mtime_ns
    arguments = ["--nodes=2", f"--output={slurm.folder}/job-%j.out", *two_nodes.arguments(undisturbed[1])]
    said = slurm.run("bash", "slurm/chain.sh", "2", *arguments)
    first, second = [line.split()[-1] for line in said.splitlines()]
    assert slurm.state(second)["Dependency"].startswith(f"afterany:{first}")
    for job in (first, second):
        state = slurm.wait(job, 60)
        assert state["JobState"] == "COMPLETED" and "the run is finished" in slurm.output(job), slurm.story(job)
        assert state["Requeue"] == "0"
    assert before == (weights(undisturbed[1]), (undisturbed[1] / "summary.json").stat().st_mtime_ns)


def test_evaluation_and_conversion_of_what_was_trained(
    slurm: Slurm, two_nodes: TwoNodes, undisturbed: tuple[str, Path]
) -> None:
    run, target = undisturbed[1], two_nodes.folder / "converted"
    newest = max((run / "checkpoints").glob("step_*"))
    evaluation = slurm.submit("evaluate.sbatch", two_nodes.arguments(run), "--nodes=2")
    conversion = slurm.submit("convert.sbatch", [str(newest), str(target)], "--nodes=1", env={"TLT_PROCESSES": "2"})
    for job in (evaluation, conversion):
        assert slurm.wait(job, LIMIT_S)["JobState"] == "COMPLETED", slurm.story(job)
    summary = json.loads((run / "summary.json").read_text())
    assert f"pass@1 {summary['eval']['end']['pass_at_1']:.3f}" in slurm.output(evaluation), slurm.output(evaluation)
    assert (target / "config.json").is_file() and list(target.glob("*.safetensors"))

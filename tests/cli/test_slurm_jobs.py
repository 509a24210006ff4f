"""What job scripts do when a job is told to stop, cancelled or loses a node: on a real Slurm, with a tlt that waits."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.helpers.launch import slowness
from tests.helpers.slurm import Slurm

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

# Stands where the environment's Python does: it trains nothing, but answers and leaves as tlt does.
TLT = """#!/usr/bin/env bash
run="$RUN" command="$3"
case "$command" in
    config)
        mkdir -p "$run/slurm"
        if [[ -e "$run/done" ]]; then finished=yes; else finished=no; fi
        if [[ "$*" == *elastic.min_devices* ]]; then
            printf '%s\\n2\\n%s\\n%s\\n' "$run" "$finished" "${LEAST:-None}"
        else
            echo "$finished"
        fi
        ;;
    train)
        echo "node $TLT_NODE_RANK of job $TLT_JOB is $SLURMD_NODENAME, they meet at $TLT_RENDEZVOUS"
        if ((${SLURM_RESTART_COUNT:-0})); then exit 0; fi
        if [[ "$LOST" == "$TLT_NODE_RANK" ]]; then exit 1; fi
        if [[ -n "${LEAST:-}" ]]; then sleep 3 && touch "$run/done" && exit 0; fi
        leave() {
            mkdir -p "$TLT_LOG_DIR"
            if ((TLT_NODE_RANK == 0)); then touch "$TLT_LOG_DIR/stopped"; fi
            exit 143
        }
        if [[ -z "$LOST" ]]; then trap leave TERM; fi
        touch "$run/ready.$TLT_NODE_RANK"
        while true; do sleep 0.1; done
        ;;
esac
"""


@pytest.fixture
def waiting(tmp_path: Path) -> dict[str, str]:
    """The environment of a job whose training waits until it is told to stop."""
    python = tmp_path / "environment" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(TLT)
    python.chmod(0o755)
    return {"TLT_VENV": str(tmp_path / "environment"), "RUN": str(tmp_path / "run"), "LOST": ""}


def submit(slurm: Slurm, environment: dict[str, str]) -> str:
    return slurm.submit("train.sbatch", ["c.yaml"], "--nodes=2", env=environment)


def submit_and_wait(slurm: Slurm, environment: dict[str, str]) -> str:
    """A job whose two nodes train."""
    job = submit(slurm, environment)
    deadline = time.monotonic() + 60 * slowness()
    while not all(Path(environment["RUN"], f"ready.{node}").exists() for node in range(2)):
        assert time.monotonic() < deadline, slurm.story(job)
        time.sleep(0.1)
    return job


def test_the_warning_to_the_script_reaches_the_nodes_and_the_job_starts_again(
    slurm: Slurm, waiting: dict[str, str]
) -> None:
    job = submit_and_wait(slurm, waiting)
    slurm.run("scancel", "--signal=TERM", "--batch", job)
    state = slurm.wait(job, 60)
    output = slurm.output(job)
    assert state["JobState"] == "COMPLETED" and state["Restarts"] == "1", slurm.story(job)
    assert "told to stop: the ranks save and leave" in output and "start 2 goes on from here" in output
    for start in range(2):
        for node in range(2):
            assert f"node {node} of job {job}.{start} is n{node}, they meet at 127.0.0.1:" in output, output


def test_a_cancelled_job_saves_and_stays_cancelled(slurm: Slurm, waiting: dict[str, str]) -> None:
    job = submit_and_wait(slurm, waiting)
    slurm.run("scancel", job)
    state = slurm.wait(job, 60)
    assert state["JobState"] == "CANCELLED" and state["Restarts"] == "0", slurm.story(job)
    deadline = time.monotonic() + 30 * slowness()
    while slurm.state(job)["JobState"] == "COMPLETING" and time.monotonic() < deadline:
        time.sleep(0.1)
    assert (Path(waiting["RUN"]) / "logs" / f"job-{job}.0" / "stopped").exists(), slurm.story(job)
    assert slurm.state(job)["JobState"] == "CANCELLED"


def test_where_requeueing_is_not_wanted_the_job_ends(slurm: Slurm, waiting: dict[str, str]) -> None:
    job = submit_and_wait(slurm, {**waiting, "TLT_REQUEUE": "no"})
    slurm.run("scancel", "--signal=TERM", job)
    state = slurm.wait(job, 60)
    assert state["JobState"] == "FAILED" and state["Restarts"] == "0", slurm.story(job)
    assert "the run's next job goes on from here" in slurm.output(job)


def test_a_node_that_is_lost_ends_the_job_on_all_and_it_is_not_started_again(
    slurm: Slurm, waiting: dict[str, str]
) -> None:
    """The others are ended by the signal that also means: save and leave. It must not be taken for that."""
    began = time.monotonic()
    job = submit(slurm, {**waiting, "LOST": "1"})
    state = slurm.wait(job, 60)
    assert state["JobState"] == "FAILED" and state["ExitCode"] == "1:0" and state["Restarts"] == "0", slurm.story(job)
    assert "n1: task 1: Exited with exit code 1" in slurm.output(job)
    assert time.monotonic() - began < 60 * slowness()


def test_a_job_that_may_go_on_with_fewer_devices_outlives_a_node(slurm: Slurm, waiting: dict[str, str]) -> None:
    job = submit(slurm, {**waiting, "LOST": "1", "LEAST": "1"})
    state = slurm.wait(job, 60)
    assert state["JobState"] == "COMPLETED" and state["Restarts"] == "0", slurm.story(job)
    assert "finished without the nodes that were lost" in slurm.output(job)
    assert Path(waiting["RUN"], "done").exists()

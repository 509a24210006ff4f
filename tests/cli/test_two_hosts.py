"""Two hosts with one cable between them, slurm/node.sh on each as srun runs it: a rank killed, then the cable cut."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import TwoNodes, steps
from tests.helpers.hosts import Hosts, hosts
from tests.helpers.launch import MARK, REPOSITORY, free_port, kill_marked, slowness, worker_of

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

COLLECTIVE_S = 20
# The collectives' limit, the question who is still there, and what torchrun is given to end by itself.
BOUND_S = COLLECTIVE_S + 40
# what a run that is to be cut need not learn
LESS = (
    "model.recipe.supervised.num_steps=20",
    "rollout.max_response_tokens=32",
    "trainer.prompts_per_step=4",
    "trainer.save_every=1",
    "evaluation.problems=8",
)
AGAIN = "all ranks restart from the checkpoint of step"


def start(network: Hosts, index: int, arguments: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen:
    """The same command on every host: only the number of the host differs."""
    with log.open("wb") as output:
        return subprocess.Popen(
            network.command(index, ["bash", "slurm/node.sh", *arguments]),
            cwd=REPOSITORY,
            env={**environment, "TLT_NODE_RANK": str(index), "TLT_NODE_NAME": f"host{index}"},
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )


def test_two_hosts_start_again_together_and_a_cut_ends_both_with_what_was_lost(
    two_nodes: TwoNodes, environment: Path
) -> None:
    folder = two_nodes.folder / "two-hosts"
    folder.mkdir()
    run, logs = folder / "run", [folder / f"host{index}.log" for index in range(2)]
    more = (f"launcher.collective_timeout_s={COLLECTIVE_S}", "launcher.max_restarts=1", "trainer.steps=1000")
    arguments = ["train", *two_nodes.arguments(run, *more, *LESS)]
    mark = uuid.uuid4().hex
    with hosts(2) as network:
        given = {
            **os.environ,
            MARK: mark,
            "TLT_VENV": str(environment),
            "TLT_RENDEZVOUS": f"{network.address(0)}:{free_port()}",
            "TLT_JOB": "by-hand",
        }
        processes = [start(network, index, arguments, given, logs[index]) for index in range(2)]

        def until(condition: Callable[[], bool]) -> None:
            deadline = time.monotonic() + 400 * slowness()
            while not condition():
                story = "\n\n".join(log.read_text(errors="replace")[-4000:] for log in logs)
                assert time.monotonic() < deadline and all(p.poll() is None for p in processes), story
                time.sleep(0.05)

        try:
            until(lambda: steps(run) >= 1 and any((run / "checkpoints").glob("step_*")))
            os.kill(worker_of(mark, 1), signal.SIGKILL)
            until(lambda: all(AGAIN in log.read_text(errors="replace") for log in logs))
            before = steps(run)
            until(lambda: steps(run) > before)
            network.link(1, "down")
            cut = time.monotonic()
            statuses = [process.wait(BOUND_S * slowness()) for process in processes]
            seconds = time.monotonic() - cut
        finally:
            kill_marked(mark)
            for process in processes:
                process.wait()
    said = [log.read_text(errors="replace") for log in logs]
    errors = [[line for line in text.splitlines() if line.startswith("error: ")] for text in said]
    assert statuses == [1, 1], said
    assert seconds < BOUND_S * slowness()
    assert errors[0] and "rank 0 (node 0" in errors[0][0] and "lost its connection to rank 1 (node 1" in errors[0][0], (
        said
    )
    assert errors[1] and "lost its connection to rank 0's node" in errors[1][0], said
    assert network.address(0) in errors[1][0]

"""Three hosts, one of which is cut off in the middle of a session: said on both sides, and mended by a new start."""

from __future__ import annotations

import subprocess
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest

from megatron_tlt.config.loader import dump_resolved, load_config
from megatron_tlt.platform.processes import launch_environment
from megatron_tlt.spot.fault_hooks import VARIABLE
from tests.helpers.hosts import INTERFACE, Hosts, hosts
from tests.helpers.launch import MARK, REPOSITORY, free_port, kill_marked, python, slowness
from tests.helpers.spot_messages import SpotMessages
from tests.trainer.conftest import GREEDY_SPOT, Runs, assert_same_policy, rows_of

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

HOSTS = 3
CUT = 2  # the host that loses the others
COLLECTIVE_S = 15
# an error behind the collectives' limit, the question who is there, and torchrun's 30 s for whoever does not end
BOUND_S = COLLECTIVE_S + 60

Answer = TypeVar("Answer")


@dataclass
class Launch:
    """torchrun on every host, as a batch script starts it; each has a log."""

    folder: Path
    hosts: Hosts
    resolved: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def messages(self) -> Path:
        return self.folder / f"messages-{self.mark}"

    def start(self) -> None:
        port = free_port()
        self.messages.mkdir()
        for index in range(HOSTS):
            command = [python(), "-m", "torch.distributed.run", f"--nnodes={HOSTS}", f"--node-rank={index}"]
            command += ["--nproc-per-node=1", f"--master-addr={self.hosts.address(0)}", f"--master-port={port}"]
            command += ["--max-restarts=0", "-m", "megatron_tlt.cli.workers.train", str(self.resolved)]
            environment = launch_environment(1) | {"PYTHONPATH": str(REPOSITORY), MARK: self.mark}
            environment |= {"GLOO_SOCKET_IFNAME": INTERFACE, "PYTHONUNBUFFERED": "1", VARIABLE: str(self.messages)}
            with self.log_file(index).open("wb") as log:
                self.processes.append(
                    subprocess.Popen(
                        self.hosts.command(index, command),
                        env=environment,
                        cwd=REPOSITORY,
                        stdout=log,
                        stderr=log,
                        stdin=subprocess.DEVNULL,
                        start_new_session=True,
                    )
                )

    def log_file(self, index: int) -> Path:
        return self.folder / f"host{index}-{self.mark}.log"

    def log(self, index: int) -> str:
        return self.log_file(index).read_text(errors="replace")

    def until(self, question: Callable[[], Answer], limit_s: float, what: str) -> Answer:
        """The first answer that is neither false nor None."""
        end = time.monotonic() + limit_s * slowness()
        while not (answer := question()):
            logs = "\n\n".join(self.log(index)[-3000:] for index in range(HOSTS))
            assert time.monotonic() < end, f"{what} took longer than {limit_s} s: {logs}"
            time.sleep(0.005)
        return answer

    def ended(self) -> bool:
        return all(process.poll() is not None for process in self.processes)

    def __enter__(self) -> Launch:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        kill_marked(self.mark)
        for process in self.processes:
            process.wait()


def in_session(launch: Launch, sent: SpotMessages) -> int:
    """Returns in the middle of a session that both waiting ranks train, with the number of RL steps before it."""
    step = launch.until(lambda: sent.session(2, 1) or launch.ended(), 240, "the session")
    assert step is not True, f"no session: {launch.log(0)[-5000:]}"
    return step


def errors(log: str) -> list[str]:
    return [line for line in log.splitlines() if line.startswith("error: ")]


def test_a_cut_is_named_on_both_sides_and_the_run_goes_on_once_it_is_mended(runs: Runs, undisturbed: Path) -> None:
    run = runs.folder / "hosts"
    run.mkdir()
    more = (f"launcher.nnodes={HOSTS}", "launcher.nproc_per_node=1", f"launcher.collective_timeout_s={COLLECTIVE_S}")
    config = load_config(runs.config, [f"run.dir={run}", *GREEDY_SPOT, *more], check_libraries=False)
    resolved = run / "config.resolved.yaml"
    resolved.write_text(dump_resolved(config))
    with hosts(HOSTS) as network:
        with Launch(runs.folder, network, resolved) as launch:
            done = in_session(launch, SpotMessages(launch.messages))
            network.link(CUT, "down")
            launch.until(launch.ended, BOUND_S, "the end")
            assert all(process.returncode != 0 for process in launch.processes)
            near, far = [errors(launch.log(index)) for index in (0, 1)], errors(launch.log(CUT))
        assert len(far) == 1, launch.log(CUT)[-5000:]
        assert f"rank {CUT} (node {CUT}" in far[0] and "lost its connection to rank 0's node" in far[0]
        assert network.address(0) in far[0]
        for rank, said in enumerate(near):
            assert len(said) == 1, launch.log(rank)[-5000:]
            assert said[0].startswith(f"error: rank {rank} (node {rank}")
            assert f"lost its connection to rank {CUT} (node {CUT}" in said[0]
        assert [row["step"] for row in rows_of(run)] == list(range(1, done + 1))

        network.link(CUT, "up")
        with Launch(runs.folder, network, resolved) as launch:
            launch.until(launch.ended, 240, "the run")
            assert [process.returncode for process in launch.processes] == [0] * HOSTS, launch.log(0)[-5000:]
    assert_same_policy(run, undisturbed)
    assert any(row["spot/steps"] for row in rows_of(run))

"""A real Slurm on this machine: munged, slurmctld and a slurmd per node, in their own folder and gone afterwards."""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_tlt.platform.processes import die_with_parent
from tests.helpers.launch import REPOSITORY, free_port, slowness

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "squeue", "sinfo")
_SYSTEM = ("/usr/sbin", "/sbin")
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "BOOT_FAIL")
SICK_NODE = "n2"
SICK_OPEN_FILES = 512

_CONF = """
ClusterName=tlt
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=%(port)s
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# A requeued job waits until its old credential has expired: 120 s unless told.
AuthInfo=socket=%(folder)s/munge.socket,cred_expire=6
StateSaveLocation=%(folder)s/state
SlurmdSpoolDir=%(folder)s/spool-%%n
SlurmctldPidFile=%(folder)s/slurmctld.pid
SlurmdPidFile=%(folder)s/slurmd-%%n.pid
SlurmctldLogFile=%(folder)s/slurmctld.log
SlurmdLogFile=%(folder)s/slurmd-%%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
# Each node has the limits that its slurmd was started with.
PropagateResourceLimits=NONE
KillWait=5
ReturnToService=2
SchedulerParameters=sched_interval=1,bf_interval=1
%(nodes)s
PartitionName=main Nodes=n0,n1 Default=YES MaxTime=INFINITE State=UP
PartitionName=sick Nodes=n0,%(sick)s MaxTime=INFINITE State=UP
"""


def why_no_slurm() -> str | None:
    """Why no cluster can be started here; None where one can."""
    missing = [name for name in _PROGRAMS if which(name) is None]
    if missing:
        return f"no Slurm here: {', '.join(missing)} missing (as root on Debian: apt-get install slurm-wlm munge)"
    if os.geteuid() != 0:
        return "no Slurm here: starting slurmctld and slurmd takes root"
    return None


def which(program: str) -> str | None:
    return shutil.which(program, path=os.pathsep.join([os.environ.get("PATH", ""), *_SYSTEM]))


@dataclass
class Slurm:
    """A running cluster. Nodes n0 and n1 are well; n2, in partition ``sick``, may open few files only."""

    folder: Path
    environment: dict[str, str]
    _jobs: list[str] = field(default_factory=list)

    def run(self, *command: str, env: Mapping[str, str] | None = None) -> str:
        """What a command of Slurm printed."""
        done = subprocess.run(
            command, cwd=REPOSITORY, env={**self.environment, **(env or {})}, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, f"{' '.join(command)}: status {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, script: str, arguments: Sequence[str], *options: str, env: Mapping[str, str] | None = None) -> str:
        """The number of the job that ``sbatch`` made of a script of ``slurm/``."""
        output = f"--output={self.folder}/job-%j.out"
        job = self.run("sbatch", "--parsable", output, *options, f"slurm/{script}", *arguments, env=env).strip()
        self._jobs.append(job)
        return job

    def state(self, job: str) -> dict[str, str]:
        """The fields of ``scontrol show job``."""
        words = self.run("scontrol", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def output(self, job: str) -> str:
        file = self.folder / f"job-{job}.out"
        return file.read_text(errors="replace") if file.is_file() else ""

    def wait(self, job: str, timeout_s: float, states: Sequence[str] = _ENDED) -> dict[str, str]:
        """Until the job is in one of ``states``; its fields then."""
        deadline = time.monotonic() + timeout_s * slowness()
        while (state := self.state(job))["JobState"] not in states:
            assert time.monotonic() < deadline, (
                f"job {job} is {state['JobState']} after {timeout_s} s\n{self.story(job)}"
            )
            time.sleep(0.2)
        return state

    def story(self, job: str) -> str:
        """What there is to read about a job that went wrong."""
        parts = [self.output(job)[-8000:]]
        parts += [f"== {file.name}\n{file.read_text(errors='replace')[-2000:]}" for file in self.folder.glob("*.log")]
        return "\n".join(parts)


@contextlib.contextmanager
def cluster(python: Path) -> Iterator[Slurm]:
    """Starts the daemons, and ends them with everything that they started.

    Args:
        python: the environment whose interpreter the jobs use (``TLT_VENV``).
    """
    # Short: a socket's path has 108 bytes at most.
    folder = Path(tempfile.mkdtemp(prefix="tlt-slurm-", dir="/tmp"))
    daemons: list[subprocess.Popen[bytes]] = []
    ports = [free_port() for _ in range(4)]
    names = ("n0", "n1", SICK_NODE)
    nodes = "\n".join(
        f"NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs={os.cpu_count()} State=UNKNOWN"
        for name, port in zip(names, ports[1:], strict=True)
    )
    (folder / "slurm.conf").write_text(_CONF % {"folder": folder, "port": ports[0], "nodes": nodes, "sick": SICK_NODE})
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    path = os.pathsep.join([os.environ["PATH"], *_SYSTEM])
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "TLT_"))},
        "SLURM_CONF": str(folder / "slurm.conf"),
        "PATH": path,
        "TLT_VENV": str(python),
    }

    def start(*command: str, open_files: int | None = None) -> None:
        def limited() -> None:
            die_with_parent(signal.SIGKILL)  # whatever ends the tests
            if open_files is not None:
                resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, open_files))

        log = (folder / f"{command[0]}-start.log").open("ab")
        daemons.append(
            subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, preexec_fn=limited, start_new_session=True
            )
        )

    slurm = Slurm(folder, environment)
    try:
        start(
            "munged",
            "--foreground",
            "--force",
            f"--key-file={key}",
            f"--socket={folder}/munge.socket",
            f"--pid-file={folder}/munged.pid",
            f"--log-file={folder}/munged.log",
            f"--seed-file={folder}/munged.seed",
        )
        _until(lambda: (folder / "munge.socket").exists(), "munged", slurm)
        start("slurmctld", "-D", "-i")
        for name in names:
            (folder / f"spool-{name}").mkdir()
            start("slurmd", "-D", "-N", name, open_files=SICK_OPEN_FILES if name == SICK_NODE else None)
        _until(lambda: _idle(slurm) == len(names), "slurmctld and slurmd", slurm)
        yield slurm
    finally:
        _end(slurm, daemons)
        shutil.rmtree(folder, ignore_errors=True)


def _idle(slurm: Slurm) -> int:
    done = subprocess.run(
        ["sinfo", "--noheader", "--Node", "--format=%N %t"], env=slurm.environment, capture_output=True, text=True
    )
    return len({line.split()[0] for line in done.stdout.splitlines() if line.endswith(" idle")})


def _until(ready: object, what: str, slurm: Slurm) -> None:
    deadline = time.monotonic() + 60 * slowness()
    while not ready():  # type: ignore[operator]
        assert time.monotonic() < deadline, f"{what} did not start\n{slurm.story('0')}"
        time.sleep(0.1)


def _end(slurm: Slurm, daemons: list[subprocess.Popen[bytes]]) -> None:
    """Jobs first, then the daemons; a job's step ends with its slurmstepd, which is told to by scancel."""
    with contextlib.suppress(subprocess.SubprocessError, AssertionError):
        jobs = slurm.run("squeue", "--noheader", "--format=%A").split()
        if jobs:
            slurm.run("scancel", "--signal=KILL", "--full", *jobs)
            slurm.run("scancel", *jobs)
        deadline = time.monotonic() + 20
        while slurm.run("squeue", "--noheader", "--format=%A").split() and time.monotonic() < deadline:
            time.sleep(0.2)
    for daemon in reversed(daemons):
        daemon.terminate()
    for daemon in reversed(daemons):
        try:
            daemon.wait(15)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()

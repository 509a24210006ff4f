"""All parts of a run that are put under faults, and trials of them in processes with deadlines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import cycle, zip_longest
from multiprocessing.connection import wait
from pathlib import Path

from megatron_tlt.bench.fault_parts.launchers import launchers_part
from megatron_tlt.bench.fault_parts.messages import messages_part
from megatron_tlt.bench.fault_parts.rewards import rewards_part
from megatron_tlt.bench.fault_parts.storage import storage_parts
from megatron_tlt.bench.fault_parts.trial import Part
from megatron_tlt.errors import RunError

DEADLINE_S = 120.0
"""A trial that takes longer hangs; the longest wait of a part is below half of it."""
PASSED, BROKEN, HUNG, NOT_POSSIBLE = "passed", "broken", "hung", "not possible"


@dataclass(frozen=True)
class FaultOutcome:
    """What came of one fault: ``result`` is "passed", "broken", "hung" or "not possible", with the reason."""

    part: str
    fault: str
    seed: str
    result: str
    reason: str
    seconds: float

    def as_row(self) -> dict[str, object]:
        return asdict(self)


def parts() -> Mapping[str, Part]:
    """The parts by name, with the trials of their faults."""
    return {
        **storage_parts(),
        "rewards": rewards_part(),
        "spot coordinator": messages_part(),
        "launchers": launchers_part(),
    }


def in_turn(found: Mapping[str, Part]) -> Iterator[tuple[str, str]]:
    """Parts and faults for ever: one of every part, then the next of every part, so that any number is a mixture."""
    columns = [[(part, fault) for fault in faults] for part, faults in found.items()]
    return cycle([pair for row in zip_longest(*columns) for pair in row if pair is not None])


class Trials:
    """Runs trials in a process of their own, which sees the disks that they mount alone; see :func:`trials`."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def run(self, part: str, fault: str, seed: str) -> FaultOutcome:
        """One trial; a hang ends at the deadline.

        Raises:
            RunError: the process of the trials has ended.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps([part, fault, seed, DEADLINE_S]).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise RunError(f"the process of the trials has ended: {error}") from error
        if not wait([self._process.stdout.fileno()], DEADLINE_S + 60.0) or not (
            line := self._process.stdout.readline()
        ):
            raise RunError(f"no outcome of {part} under {fault}, seed {seed}; its output is in the log")
        return FaultOutcome(part, fault, seed, *json.loads(line))


@contextmanager
def trials(folder: Path, log: Path) -> Iterator[Trials]:
    """Trials in folders below ``folder``; what they print goes to ``log``."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-W", "ignore", "-m", "megatron_tlt.bench.workers.faults", str(folder)]
    own = ["unshare", "--mount", "--propagation", "private"]  # mounts of a killed trial end with this process
    if _works([*own, "true"]):
        command = [*own, *command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            env=environment,
            start_new_session=True,
        )
        try:
            yield Trials(process)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _works(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False

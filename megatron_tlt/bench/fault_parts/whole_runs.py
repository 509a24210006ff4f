"""Faults of whole runs: each run has several, is started again as Slurm would, and must end with the bits of none.

Every run, the undisturbed one too, has a verifier that fails for some responses and a loss that is NaN in some steps.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from megatron_tlt.bench.fault_parts import wild, wild_loss
from megatron_tlt.bench.fault_parts.storage import delete, flip, truncate
from megatron_tlt.bench.fault_parts.trial import Broken, check
from megatron_tlt.bench.outside import processes_below, ranks_below
from megatron_tlt.config.loader import load_config
from megatron_tlt.config.phases import PHASES
from megatron_tlt.errors import ConfigError, RunError
from megatron_tlt.observe.jsonl import read_jsonl
from megatron_tlt.observe.metrics import METRICS_FILE, read_metrics, recorded_steps
from megatron_tlt.observe.samples import SAMPLES_FILE

_RUN_LIMIT_S = 1800.0
_START_LIMIT_S = 300
_PHASE_LIMIT_S = 30
_STARTS_PER_FAULT = 2
_FAULT_LIMIT_S = 60.0 + _STARTS_PER_FAULT * (_START_LIMIT_S + 60) + 4 * _PHASE_LIMIT_S
"""From a fault to the next step: a phase at its limit and torchrun's 30 s, all starts, and a slow step."""
_COLLECTIVE_LIMIT_S = 1200
"""More than that, so a phase that nobody limits does not pass."""
_POLL_S = 0.05
SETTINGS = (
    "evaluation.every=0",
    "observe.progress=false",
    "observe.tensorboard=false",
    "trainer.save_every=1",
    "trainer.keep_checkpoints=3",
    "launcher.max_restarts=100",
    f"launcher.collective_timeout_s={_COLLECTIVE_LIMIT_S}",
    "guard={on_nonfinite: skip, most_in_a_row: 50}",
    f"algorithm.loss={wild_loss.PATH}",
    "rewards={workers: 1, timeout_s: 20}",
)
"""Of every run of the campaign."""


def settings_of(config: Path, overrides: Sequence[str]) -> list[str]:
    """All overrides of a run; its tasks have the verifier that fails at times, which calls their own.

    Raises:
        ConfigError: the config is invalid, or has a task with another verifier.
    """
    tasks = []
    for task in load_config(config, [*overrides, *SETTINGS]).tasks:
        if task.verifier != "reasoning_gym":
            raise ConfigError(f"tasks: found the verifier {task.verifier!r}; the campaign allows: reasoning_gym")
        given = task.model_dump(mode="json", exclude_unset=True)
        tasks.append(given | {"verifier": f"{wild.__name__}.score_or_fail"})
    return [*overrides, *SETTINGS, f"tasks={json.dumps(tasks)}"]


@dataclass(frozen=True)
class RunFault:
    """A fault of a run: what was done, after how many recorded steps, and how many steps were lost to it."""

    fault: str
    after_step: int
    lost_steps: int
    starts: int
    seconds: float


class FaultyRun:
    """One run of the campaign.

    Args:
        config: launch config.
        overrides: of the config.
        folder: of the run; its snapshots are beside it.
        steps: of the run.
    """

    def __init__(self, config: Path, overrides: Sequence[str], folder: Path, steps: int) -> None:
        self.folder, self.steps = folder, steps
        self._memory = folder.with_name(f"{folder.name}-memory")
        # the last steps of a run too have a limit: a rank may lose its memory while it evaluates
        limits = ", ".join(f"{phase}: {_START_LIMIT_S if phase == 'start' else _PHASE_LIMIT_S}" for phase in PHASES)
        own = [
            f"run.dir={folder}",
            f"trainer.steps={steps}",
            f"elastic.memory_dir={self._memory}",
            f"launcher.phase_timeouts_s={{{limits}}}",
        ]
        given = [*settings_of(config, overrides), *own]
        self._command = [sys.executable, "-m", "megatron_tlt", "train", str(config), *given]
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = 0

    def start(self) -> None:
        self._memory.mkdir(parents=True, exist_ok=True)
        self._starts += 1
        with self.folder.with_suffix(".log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def until(self, step: int, limit_s: float = _RUN_LIMIT_S) -> int:
        """Until so many steps are recorded; a run that ended with an error is started again, as Slurm would.

        Returns the smallest number that was recorded meanwhile: a run that resumes drops the rows of later steps.

        Raises:
            Broken: the run does not go on.
        """
        least = step

        def is_there() -> bool:
            nonlocal least
            recorded = recorded_steps(self.folder)
            least = min(least, recorded)
            return recorded >= step

        self._keep_going(is_there, f"step {step}", limit_s)
        return least

    def finish(self) -> None:
        """Waits for the end of the run, with status 0; starts it again as :meth:`until` does."""
        assert self._process is not None
        self._keep_going(lambda: self._process is not None and self._process.poll() == 0, "the run's end")

    def _keep_going(self, is_done: Callable[[], bool], what: str, limit_s: float = _RUN_LIMIT_S) -> None:
        end, starts = time.monotonic() + limit_s, self._starts
        while not is_done():
            assert self._process is not None
            check(time.monotonic() < end, f"{what} is not reached within {limit_s:g} s")
            if self._process.poll() is not None:
                check(self._process.returncode, f"the run ended before {what} without an error")
                often = f"the run ended {_STARTS_PER_FAULT} times after a fault"
                check(self._starts < starts + _STARTS_PER_FAULT, often)
                self.start()
            time.sleep(_POLL_S)

    def do(self, fault: str, rng: random.Random, after_step: int) -> RunFault:
        """One fault at a random moment of the step after ``after_step``; returns when the run has gone on."""
        self.until(after_step)
        rows = [row["time/total"] or 0.0 for row in read_metrics(self.folder / METRICS_FILE) if row["step"]]
        time.sleep(rng.uniform(0.0, 1.2 * statistics.median(rows[-3:])))
        starts, began, done = self._starts, time.perf_counter(), recorded_steps(self.folder)
        FAULTS[fault](self, rng)
        least = self.until(min(done + 1, self.steps), _FAULT_LIMIT_S)
        return RunFault(fault, done, max(0, done - least), self._starts - starts, time.perf_counter() - began)

    def compare(self, undisturbed: Path) -> None:
        """Raises Broken unless the run did the same as ``undisturbed``: every step and response once, and all bits."""
        found, wanted = (
            [row for row in read_metrics(folder / METRICS_FILE) if row["step"]] for folder in (self.folder, undisturbed)
        )
        check([row["step"] for row in found] == list(range(1, self.steps + 1)), "a step is missing, or there twice")
        for name in ("actor/loss", "actor/grad_norm", "reward/mean", "guard/skipped"):
            check([row[name] for row in found] == [row[name] for row in wanted], f"{name} differs")
        check(*_same_samples(self.folder, undisturbed))
        weights = [(folder / "hf" / "model.safetensors").read_bytes() for folder in (self.folder, undisturbed)]
        check(weights[0] == weights[1], "the weights at the end differ")

    def rank(self, rng: random.Random) -> psutil.Process:
        """The process of a random rank; waits for one while ranks start again."""
        return self._some(lambda pid: [one for _, one in sorted(ranks_below(pid).items())], rng, "rank")

    def verifier(self, rng: random.Random) -> psutil.Process:
        """A process of verifiers, in the same way."""
        return self._some(_verifiers, rng, "verifier")

    def _some(self, find: Callable[[int], list[psutil.Process]], rng: random.Random, what: str) -> psutil.Process:
        assert self._process is not None
        found: list[psutil.Process] = []
        end = time.monotonic() + _RUN_LIMIT_S
        while not (found := find(self._process.pid)):
            check(time.monotonic() < end, f"no {what} is there within {_RUN_LIMIT_S:g} s")
            time.sleep(_POLL_S)
        return rng.choice(found)

    @property
    def _runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def power_cut(self) -> None:
        """All processes end at once, and with them what is in memory."""
        assert self._process is not None
        # stopped first, so that none sees another one end
        found = [psutil.Process(self._process.pid), *processes_below(self._process.pid)] if self._runs else []
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in found:
                try:
                    process.send_signal(number)
                except psutil.NoSuchProcess:
                    continue
        self._process.wait()
        shutil.rmtree(self._memory, ignore_errors=True)

    def close(self) -> None:
        """Ends the run's processes."""
        if self._runs:
            self.power_cut()
        shutil.rmtree(self._memory, ignore_errors=True)


def _same_samples(found: Path, wanted: Path) -> tuple[bool, str]:
    rows = [read_jsonl(folder / SAMPLES_FILE) for folder in (found, wanted)]
    keys = [tuple(row[key] for key in ("step", "origin", "problem", "sample")) for row in rows[0]]
    if len(set(keys)) != len(keys):
        return False, "a response was used twice"
    return rows[0] == rows[1], "the responses differ"


def _kill(run: FaultyRun, rng: random.Random) -> None:
    run.rank(rng).send_signal(signal.SIGKILL)


def _stop(run: FaultyRun, rng: random.Random) -> None:
    run.rank(rng).send_signal(signal.SIGSTOP)


def _hold(process: psutil.Process, seconds: float) -> None:
    process.send_signal(signal.SIGSTOP)
    time.sleep(seconds)
    process.send_signal(signal.SIGCONT)


def _without_memory(run: FaultyRun, rng: random.Random) -> None:
    process = run.rank(rng)
    resource.prlimit(process.pid, resource.RLIMIT_AS, (process.memory_info().vms, resource.RLIM_INFINITY))


def _without_disk(run: FaultyRun, rng: random.Random) -> None:
    """As on a full disk, without one: no file that a rank writes may become larger than some kilobytes."""
    resource.prlimit(run.rank(rng).pid, resource.RLIMIT_FSIZE, (rng.randrange(1 << 16), resource.RLIM_INFINITY))


def _verifiers(launcher: int) -> list[psutil.Process]:
    found = []
    for process in processes_below(launcher):
        try:
            if any(part.endswith("rewards.worker") for part in process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def _power_cut(run: FaultyRun, rng: random.Random) -> None:
    run.power_cut()


def _damage(change: Callable[[Path, random.Random], None]) -> Callable[[FaultyRun, random.Random], None]:
    def act(run: FaultyRun, rng: random.Random) -> None:
        run.power_cut()
        found = sorted((run.folder / "checkpoints").glob("step_*"))
        files = sorted(path for path in found[-1].rglob("*") if path.is_file() and path.stat().st_size)
        change(rng.choice(files), rng)

    return act


_TWO_FAULTS = {
    "power cut, truncated checkpoint": _damage(truncate),
    "power cut, flipped bit": _damage(flip),
    "power cut, deleted file": _damage(delete),
}
FAULTS: dict[str, Callable[[FaultyRun, random.Random], None]] = {
    "rank: SIGKILL": _kill,
    "rank: SIGSTOP": _stop,
    "rank: held for seconds": lambda run, rng: _hold(run.rank(rng), rng.uniform(0.1, 5.0)),
    "rank: out of memory": _without_memory,
    "verifier: held for seconds": lambda run, rng: _hold(run.verifier(rng), rng.uniform(0.1, 2.0)),
    "rank: no room for files": _without_disk,
    "power cut": _power_cut,
    **_TWO_FAULTS,
}
"""What may happen to a run, by name."""
MOST_LOST = {name: 2 if name in _TWO_FAULTS else 1 for name in FAULTS}
"""Recorded steps that may be done again: what damages the newest checkpoint as well is two faults."""


def undisturbed(config: Path, overrides: Sequence[str], folder: Path, steps: int) -> None:
    """Trains the run without faults unless it is there; raises RunError if it fails."""
    if (folder / "hf" / "model.safetensors").is_file():
        return
    run = FaultyRun(config, overrides, folder, steps)
    run.start()
    try:
        run.finish()
    except Broken as error:
        raise RunError(f"{folder}: the run without faults failed: {error}") from error
    finally:
        run.close()

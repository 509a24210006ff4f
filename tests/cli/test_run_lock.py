"""The lock of a run's folder, held by real processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from megatron_tlt.cli import main
from megatron_tlt.cli.run_lock import LOCK, LockHolder, RunLock
from megatron_tlt.errors import ConfigError, RunError
from tests.config.test_loader import write

_HOLD = """
import sys, time
from pathlib import Path
from megatron_tlt.cli.run_lock import RunLock
lock = RunLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""
_HOLD_OVER_EXEC = """
import os, sys
from pathlib import Path
from megatron_tlt.cli.run_lock import RunLock
RunLock(Path(sys.argv[1])).keep_over_exec()
os.execv(sys.executable, [sys.executable, "-c", "import time; print('held', flush=True); time.sleep(60)"])
"""


def hold(folder: Path, program: str = _HOLD) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = hold(tmp_path)
    yield process
    process.kill()
    process.communicate()


def say_another_host(folder: Path) -> None:
    """What the lock's file says of its holder is changed to another host."""
    (folder / LOCK).write_text(json.dumps(asdict(replace(LockHolder.current(), host="far-away"))))


def test_a_folder_in_use_is_refused_naming_its_process(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    for _ in range(2):  # a refusal must not free it
        with pytest.raises(ConfigError, match=rf"run\.dir: .* is used by process {holder.pid} on .* since 20"):
            RunLock(tmp_path)


def test_train_refuses_a_folder_in_use_also_with_fresh(
    tmp_path: Path, holder: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.resolved.yaml").touch()
    config = str(write(tmp_path, actor={"transformer_impl": "local"}))
    assert main(["train", config, f"run.dir={tmp_path}", "--fresh"]) == 2
    assert f"is used by process {holder.pid}" in capsys.readouterr().err
    assert (tmp_path / "checkpoints").is_dir()


def test_a_killed_holders_lock_is_free_at_once(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    began = time.monotonic()
    with contextlib.closing(RunLock(tmp_path)), pytest.raises(ConfigError, match=f"process {os.getpid()} on "):
        RunLock(tmp_path)
    RunLock(tmp_path).close()
    assert time.monotonic() - began < 5


def test_a_program_that_takes_the_holders_place_holds_it(tmp_path: Path) -> None:
    process = hold(tmp_path, _HOLD_OVER_EXEC)
    try:
        with pytest.raises(ConfigError, match=f"process {process.pid} on "):
            RunLock(tmp_path)
    finally:
        process.kill()
        process.communicate()
    RunLock(tmp_path).close()


def test_a_lock_of_another_host_is_waited_for(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    say_another_host(tmp_path)
    with pytest.raises(ConfigError, match="on far-away"):
        RunLock(tmp_path, wait_s=0.1)
    death = threading.Timer(0.5, holder.kill)
    death.start()
    RunLock(tmp_path, wait_s=60).close()
    death.join()


def test_of_many_starters_one_gets_it(tmp_path: Path) -> None:
    program = _HOLD.replace("time.sleep(60)", "sys.stdin.read()")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    starters = [subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], **pipes) for _ in range(4)]  # type: ignore[call-overload]
    deadline = time.monotonic() + 60
    while sum(process.poll() is None for process in starters) > 1:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    held = [process.communicate(timeout=60)[0] for process in starters]
    assert held.count(b"held\n") == 1


def test_a_folder_that_cannot_be_written_is_an_error_of_one_line() -> None:
    with pytest.raises(RunError, match=r"run\.dir: cannot write /proc/foo"):
        RunLock(Path("/proc/foo"))

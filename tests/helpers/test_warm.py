"""A fork stands for a Python: what comes in and goes out, how it ends, and that nothing of it stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.helpers.hosts import hosts
from tests.helpers.launch import MARK, kill_marked, python, run_logged, run_python, run_torchrun, slowness
from tests.helpers.warm import warm_python

pytestmark = pytest.mark.distributed

WHO = """
import json, os, sys, threading
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ONLY_HERE")
print(json.dumps({
    "pid": os.getpid(), "argv": sys.argv, "name": __name__, "file": globals().get("__file__"), "cwd": os.getcwd(),
    "env": {name: os.environ[name] for name in names if name in os.environ}, "threads": threading.active_count(),
    "torch": "torch" in sys.modules, "path": sys.path[0], "main": sys.modules["__main__"].__dict__ is globals(),
}))
"""
SLEEP = "import time; print('asleep', flush=True); time.sleep(600)"
# a child that leaves the session and the process that started it
STRAY = """
import os, pathlib, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
        time.sleep(600)
    os._exit(0)
os.wait()
while not pathlib.Path(sys.argv[1]).is_file() or not pathlib.Path(sys.argv[1]).read_text():
    time.sleep(0.01)
"""


def script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(text)
    return path


def said(log: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in log.splitlines() if line.startswith("{")]


def gone(pid: int) -> bool:
    """Whether that process ends within some seconds."""
    deadline = time.monotonic() + 20
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_on_a_cpu_the_imports_leave_a_process_that_can_be_forked() -> None:
    torch = pytest.importorskip("torch")
    assert (warm_python() == sys.executable) == torch.cuda.is_available()


@pytest.mark.parametrize("fresh", [False, True])
def test_a_script_finds_what_it_would_find_in_a_python_of_its_own(tmp_path: Path, fresh: bool) -> None:
    path = script(tmp_path, WHO)
    (row,) = said(run_python(path, ["a", "b c"], env={"ONLY_HERE": "x"}, fresh=fresh))
    assert row["argv"] == [str(path), "a", "b c"] and row["file"] == str(path)
    assert row["name"] == "__main__" and row["main"] is True and row["path"] == str(tmp_path)
    assert row["env"] == {"ONLY_HERE": "x"} and row["threads"] == 1
    assert row["torch"] is not fresh


def test_the_ranks_get_torchruns_environment_and_a_status_comes_back(tmp_path: Path) -> None:
    path = script(tmp_path, WHO + "\nsys.exit(3 * int(os.environ['RANK']))")
    rows = said(run_torchrun(path, 2, ["a"], expect_status=1))
    ranks = sorted((row["env"] for row in rows), key=lambda env: env["RANK"])  # type: ignore[index]
    assert [(env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"]) for env in ranks] == [("0", "0", "2"), ("1", "1", "2")]  # type: ignore[index]
    assert len({env["MASTER_PORT"] for env in ranks}) == 1  # type: ignore[index]
    assert "exitcode  : 3" in run_torchrun(path, 2, expect_status=None)


@pytest.mark.parametrize("fresh", [False, True])
def test_code_and_modules_and_streams(fresh: bool) -> None:
    code = "import sys; print(sys.argv, sys.stdin.read()); print('to the other', file=sys.stderr); sys.exit(7)"
    done = subprocess.run([python(fresh), "-c", code, "x"], input="given", capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (7, "['-c', 'x'] given\n", "to the other\n")
    done = subprocess.run([python(fresh), "-m", "json.tool"], input='{"a": 1}', capture_output=True, text=True)
    assert json.loads(done.stdout) == {"a": 1}
    done = subprocess.run([python(fresh), "-c", "def f(): 1 / 0\nf()"], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == "ZeroDivisionError: division by zero"


@pytest.mark.parametrize("fresh", [False, True])
def test_it_is_in_the_network_of_who_started_it(fresh: bool) -> None:
    code = [python(fresh), "-c", "import os; print(os.readlink('/proc/self/ns/net'))"]
    with hosts(1) as network:
        there = run_logged(network.command(0, ["readlink", "/proc/self/ns/net"]), 60)
        assert run_logged(network.command(0, code), 60) == there != os.readlink("/proc/self/ns/net") + "\n"
    assert run_logged(code, 60) == os.readlink("/proc/self/ns/net") + "\n"


def test_nothing_passes_from_one_run_to_the_next(tmp_path: Path) -> None:
    change = "import os, random, sys, torch; os.environ['ONLY_HERE'] = 'x'; sys.modules['only_here'] = sys"
    drawn = "; import numpy; print(random.random(), numpy.random.random(), torch.initial_seed())"
    first = run_logged([python(), "-c", change + drawn], 60).split()
    look = "import os, random, sys, torch; print('ONLY_HERE' in os.environ, 'only_here' in sys.modules)"
    second = run_logged([python(), "-c", look + drawn], 60).split()
    assert second[:2] == ["False", "False"]
    assert all(a != b for a, b in zip(first, second[2:], strict=True)), "both went on from one state"


def test_a_hang_ends_at_the_limit_with_the_log(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = f"import os; print(os.getpid(), file=open({str(pids)!r}, 'a')); " + SLEEP
    began = time.monotonic()
    with pytest.raises(AssertionError, match=r"still running after .* log:\n(.|\n)*asleep"):
        run_torchrun(script(tmp_path, code), 2, timeout_s=5)
    assert time.monotonic() - began < 60 * slowness()
    ranks = [int(pid) for pid in pids.read_text().split()]
    assert len(ranks) == 2 and not any(psutil.pid_exists(pid) for pid in ranks), "they were killed and waited for"


def test_a_rank_that_dies_ends_the_rest(tmp_path: Path) -> None:
    text = "import os, signal\nif os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)\n" + SLEEP
    log = run_torchrun(script(tmp_path, text), 2, timeout_s=60, expect_status=1)
    assert "Signal 9 (SIGKILL)" in log and "exitcode  : -9" in log


def test_a_stray_child_of_a_run_is_killed_when_its_parent_has_ended(tmp_path: Path) -> None:
    run_python(script(tmp_path, STRAY), [str(tmp_path / "pid")])
    assert gone(int((tmp_path / "pid").read_text()))


def started(code: str, **env: str) -> tuple[subprocess.Popen[str], int]:
    """A fork that runs code which begins by saying its process."""
    command = [warm_python(), "-c", "import os; print(os.getpid(), flush=True); " + code]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **env})
    assert process.stdout is not None
    return process, int(process.stdout.readline())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_the_fork_and_its_death_is_its_stand_ins(number: signal.Signals) -> None:
    process, _ = started(f"import signal, sys; signal.signal({number:d}, lambda *_: sys.exit(5)); " + SLEEP)
    assert process.stdout is not None and process.stdout.readline()
    process.send_signal(number)
    assert process.wait(30) == 5
    process, pid = started(SLEEP)
    os.kill(pid, signal.SIGTERM)
    assert process.wait(30) == -signal.SIGTERM


def test_a_killed_stand_in_takes_its_fork_along() -> None:
    process, pid = started(SLEEP)
    process.kill()
    process.wait()
    assert gone(pid)


def test_a_mark_ends_the_runs_that_have_it_and_no_others() -> None:
    ended, first = started(SLEEP, **{MARK: "this"})
    other, second = started(SLEEP, **{MARK: "that"})
    kill_marked("this")
    assert not psutil.pid_exists(first) and ended.wait(30) == -signal.SIGKILL
    assert subprocess.run([warm_python(), "-c", "1"], env={**os.environ, MARK: "this"}).returncode == -signal.SIGKILL
    assert psutil.pid_exists(second) and other.poll() is None
    kill_marked("that")
    assert other.wait(30) == -signal.SIGKILL


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "HF_HUB_OFFLINE", "PYTHONHASHSEED"])
def test_what_is_read_at_import_cannot_be_changed_in_a_fork(name: str) -> None:
    code = "import os, sys; print(os.environ[sys.argv[1]], 'torch' in sys.modules)"
    assert run_logged([python(), "-c", code, name], 60, {name: "7"}) == "7 False\n"


def test_options_and_inherited_descriptors_are_for_a_real_python() -> None:
    code = "import sys; print('torch' in sys.modules)"
    assert run_logged([python(), "-W", "error", "-c", code], 60) == "False\n"
    reading, writing = os.pipe()
    command = [python(), "-c", f"import os; os.write({writing}, b'through')"]
    subprocess.run(command, pass_fds=[writing], check=True)
    assert os.read(reading, 20) == b"through"
    os.close(reading)
    os.close(writing)


def test_the_server_and_its_forks_end_with_the_process_that_started_it() -> None:
    fork = "import os; print(os.getppid(), os.getpid(), flush=True); " + SLEEP
    code = (
        "import os, signal, subprocess, sys\n"
        "from tests.helpers.warm import warm_python\n"
        f"command = [warm_python(), '-c', {fork!r}]\n"
        "process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)\n"
        "print(process.stdout.readline())\n"
        "sys.stdout.flush()\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120 * slowness())
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert all(gone(int(pid)) for pid in done.stdout.split()) and len(done.stdout.split()) == 2

"""launch(): real torchrun, real processes, real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron_tlt.cli import launch as launching
from megatron_tlt.cli.launch import launch
from megatron_tlt.cli.torchruns import Torchruns
from megatron_tlt.config.loader import dump_resolved, load_config
from megatron_tlt.config.schema import LauncherConfig
from megatron_tlt.errors import ConfigError
from megatron_tlt.platform import preload as preloading
from tests.config.test_loader import write

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(params=["", "tests.cli.imports_for_tests"], ids=["from nothing", "forks"])
def preload(request: pytest.FixtureRequest) -> str:
    """What ranks are forks of."""
    return str(request.param)


def imported(folder: Path) -> list[int]:
    """The processes that have imported what is preloaded, in their order."""
    file = folder / "imports"
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def start(folder: Path, name: str, *more: str, preload: str = "") -> subprocess.Popen[str]:
    processes = ["launcher.nproc_per_node=2", "launcher.threads_per_process=1"]
    overrides = [f"run.name={name}", f"run.dir={folder}", *processes, *more]
    resolved = folder / "resolved.yaml"
    resolved.write_text(dump_resolved(load_config(write(folder), overrides, check_libraries=False)))
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.cli.launch_for_tests",
            str(resolved),
            str(folder / "log"),
            *filter(None, [preload]),
        ],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        env={key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_RANK")}
        | {"TLT_TEST_IMPORTS": str(folder / "imports")},
    )


def wait_for(*files: Path) -> None:
    deadline = time.monotonic() + 120
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline, f"none of {files} after 120 s"
        time.sleep(0.05)


def pids(folder: Path) -> list[int]:
    return [int((folder / f"pid{rank}").read_text()) for rank in range(2)]


def wait_gone(numbers: list[int]) -> bool:
    deadline = time.monotonic() + 20
    while any(psutil.pid_exists(n) and psutil.Process(n).status() != psutil.STATUS_ZOMBIE for n in numbers):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def test_success_is_status_0_and_threads_are_set(tmp_path: Path, preload: str) -> None:
    process = start(tmp_path, "fine", preload=preload)
    assert process.communicate(timeout=120)[1] == ""
    assert process.returncode == 0
    assert [(tmp_path / f"threads{rank}").read_text() for rank in range(2)] == ["1", "1"]
    assert [(tmp_path / f"name{rank}").read_text() for rank in range(2)] == ["tlt rank 0\n", "tlt rank 1\n"]
    if preload:
        (parent,) = imported(tmp_path)
        assert [int((tmp_path / f"parent{rank}").read_text()) for rank in range(2)] == [parent, parent]


def test_the_next_start_is_prepared_once_a_step_is_done(tmp_path: Path) -> None:
    process = start(tmp_path, "dies-prepared", preload="tests.cli.imports_for_tests")
    error = process.communicate(timeout=120)[1]
    assert process.returncode == 0, error
    assert error == "warning: rank 1 was killed by SIGKILL in step 2; all ranks restart from step 0 (restart 1 of 3)\n"
    first, second, *_ = imported(tmp_path)
    assert [int((tmp_path / f"parent{rank}").read_text()) for rank in range(2)] == [second, second] != [first, first]
    assert wait_gone(imported(tmp_path))


@pytest.mark.parametrize(
    ("imports", "reason"),
    [
        ("nonexistent_package", "ModuleNotFoundError: No module named 'nonexistent_package'"),
        ("tests.cli.thread_for_tests", "an import has started threads: "),
    ],
)
def test_ranks_start_from_nothing_where_they_cannot_be_forks(tmp_path: Path, imports: str, reason: str) -> None:
    process = start(tmp_path, "fine", preload=imports)
    assert process.communicate(timeout=120)[1] == ""
    assert process.returncode == 0
    assert f"ranks start from nothing: {reason}" in (tmp_path / "log").read_text()


def test_ranks_have_the_threads_that_are_asked_for(tmp_path: Path) -> None:
    more = ("launcher.threads_per_process=2",)
    process = start(tmp_path, "fine", *more, preload="megatron_tlt.cli.workers.imports_training")
    assert process.communicate(timeout=120)[1] == ""
    assert "start from nothing" not in (tmp_path / "log").read_text()
    assert [(tmp_path / f"threads{rank}").read_text() for rank in range(2)] == ["2", "2"]


def test_the_environment_is_that_of_a_process_that_imports_itself() -> None:
    before = {"KEPT": "1", "CHANGED": "8", "REMOVED": "x", "PORT": "1"}
    imported = {"KEPT": "1", "CHANGED": "1", "ADDED": "a", "PORT": "1"}
    start = {"KEPT": "1", "CHANGED": "8", "REMOVED": "x", "PORT": "2", "NEW": "n"}
    wanted = {"KEPT": "1", "CHANGED": "1", "ADDED": "a", "PORT": "2", "NEW": "n"}
    assert preloading._after_imports(start, before, imported) == wanted


def test_a_start_message_larger_than_a_pipe_blocks_nobody(tmp_path: Path) -> None:
    waiting = preloading.PreloadedTorchrun(["time"], os.environ | {"PYTHONPATH": str(ROOT)}, None)
    began = time.monotonic()
    process = waiting.start(preloading.Start([], {"LARGE": "x" * (1 << 20)}, 1))
    assert time.monotonic() - began < 1.0
    process.kill()
    process.wait()


def test_ranks_that_are_bound_to_processors_start_from_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_tlt.cli.torchruns.numa_binding", lambda: ["--numa-binding=node"])
    assert not Torchruns("m", None, ["tests.cli.imports_for_tests"]).preloads


def test_the_next_start_is_prepared_once_and_a_failure_ends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[int] = []

    class NoProcess(Torchruns):
        def prepare(self, launcher: LauncherConfig) -> None:
            asked.append(launcher.nproc_per_node)
            raise BlockingIOError("no process")

    steps = iter([8, 5, 5, 6, 7])
    reserve = launching._Reserve(NoProcess("m", None, ["time"]), LauncherConfig(), lambda: (next(steps), 0))
    for _ in range(5):
        reserve._next_look = 0.0
        reserve.look()
    assert asked == [1] and next(steps) == 7, "a resumed run's first new step, and none is looked at after it"
    assert "the next start is not prepared: no process" in capsys.readouterr().err


def test_a_workers_status_and_message_come_back_once_and_nobody_is_left(tmp_path: Path, preload: str) -> None:
    process = start(tmp_path, "bad", preload=preload)
    assert process.communicate(timeout=120)[1] == "error: tensor x: found 1; allowed: 2\n"
    assert process.returncode == 2
    assert wait_gone(pids(tmp_path))
    # torchrun's own complaint is kept, away from the terminal
    assert "ChildFailedError" in (tmp_path / "log").read_text()


def test_a_bug_is_status_1_with_its_traceback(tmp_path: Path, preload: str) -> None:
    process = start(tmp_path, "bug", preload=preload)
    error = process.communicate(timeout=120)[1]
    assert process.returncode == 1
    assert error.count("Traceback") == 1 and "ZeroDivisionError: a bug" in error


def test_sigterm_reaches_the_workers_which_save(tmp_path: Path, preload: str) -> None:
    process = start(tmp_path, "wait", preload=preload)
    wait_for(tmp_path / "ready0", tmp_path / "ready1")
    process.send_signal(signal.SIGTERM)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 128 + signal.SIGTERM
    assert error == "error: stopped by SIGTERM, state saved\n"
    assert (tmp_path / "saved0").exists() and (tmp_path / "saved1").exists()
    assert wait_gone(pids(tmp_path))


def test_a_rank_that_is_killed_makes_all_ranks_start_again(tmp_path: Path, preload: str) -> None:
    process = start(tmp_path, "dies", preload=preload)
    error = process.communicate(timeout=120)[1]
    assert process.returncode == 0
    resumed = "all ranks restart from the checkpoint of step 2 (restart 1 of 3)"
    line = f"rank 1 was killed by SIGKILL in step 4; {resumed}"
    assert error == f"warning: {line}\n"
    assert line in (tmp_path / "log").read_text()
    assert [(tmp_path / f"starts{rank}").read_text() for rank in range(2)] == ["2", "2"]


def test_a_rank_whose_connection_breaks_first_does_not_hide_the_one_that_was_killed(tmp_path: Path) -> None:
    process = start(tmp_path, "dies-late")
    error = process.communicate(timeout=120)[1]
    assert process.returncode == 0, error
    assert error.startswith("warning: rank 1 was killed by SIGKILL in step 1; all ranks restart from step 0")


def test_a_node_that_loses_others_starts_again_and_meets_them(tmp_path: Path) -> None:
    process = start(tmp_path, "lost")
    error = process.communicate(timeout=120)[1]
    assert process.returncode == 0
    assert error == (
        "warning: rank 0 lost its connection to rank 9 in step 1; all ranks restart from step 0 (restart 1 of 3)\n"
    )
    assert (tmp_path / "starts0").read_text() == "2"


def test_a_rank_that_aborts_after_it_has_reported_its_error_is_no_reason_to_start_again(
    tmp_path: Path, preload: str
) -> None:
    process = start(tmp_path, "aborts", preload=preload)
    error = process.communicate(timeout=120)[1]
    assert process.returncode == 1 and error == "error: gradient norm nan\n"
    assert (tmp_path / "starts0").read_text() == "1"


def test_a_step_that_ends_so_twice_is_not_tried_again(tmp_path: Path) -> None:
    process = start(tmp_path, "dies-again")
    error = process.communicate(timeout=120)[1].splitlines()
    assert process.returncode == 1
    assert error[1:] == [
        "warning: rank 1 was killed by SIGSEGV in step 4, as before: not restarted",
        f"error: rank 1 was killed by SIGSEGV; its output is in {tmp_path / 'log'}",
    ]
    assert (tmp_path / "starts1").read_text() == "2"


@pytest.mark.parametrize(("most", "starts"), [(0, "1"), (1, "2")])
def test_no_more_restarts_than_allowed(tmp_path: Path, most: int, starts: str) -> None:
    process = start(tmp_path, "dies-further", f"launcher.max_restarts={most}")
    error = process.communicate(timeout=120)[1].splitlines()
    assert process.returncode == 1
    assert error[-1].startswith("error: rank 1 was killed by SIG")
    assert (len(error), (tmp_path / "starts1").read_text()) == (1 + 2 * most, starts)
    assert not most or "in step 5; launcher.max_restarts, 1, is used up: not restarted" in error[-2]


def test_nobody_is_left_when_the_launcher_is_killed(tmp_path: Path, preload: str) -> None:
    process = start(tmp_path, "wait", preload=preload)
    wait_for(tmp_path / "ready0", tmp_path / "ready1")
    process.kill()
    process.communicate(timeout=30)
    assert wait_gone(pids(tmp_path))


def test_several_nodes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"launcher\.nnodes: found 2"):
        launch("x", [], LauncherConfig(nnodes=2))


def test_a_torchrun_that_lost_the_signal_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter that still imports can lose a SIGINT; the run would go on to its end."""
    monkeypatch.setattr(launching, "_ASKED_AGAIN_S", 1)
    loses_one = "import signal, time\nsignal.signal(2, lambda *_: signal.signal(2, signal.SIG_DFL))\n"
    with subprocess.Popen(
        [sys.executable, "-c", loses_one + "print(flush=True)\ntime.sleep(60)"], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.readline()
        child = launching._Child(scheduled=False)
        child.pass_on(signal.SIGINT)
        assert (
            child.run(process, failed=lambda: False, obsolete=lambda: False, meanwhile=lambda: None) == -signal.SIGINT
        )


def test_a_sigint_while_torchrun_is_imported_ends_it() -> None:
    for after_s in (0.2, 0.5, 0.8, 1.1):
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "megatron_tlt.platform.torchrun",
                "--nproc_per_node=1",
                "--standalone",
                "-m",
                "this",
            ],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        time.sleep(after_s)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) != 0

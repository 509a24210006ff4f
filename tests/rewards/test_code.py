"""Programs judged in the sandbox: right, wrong and hostile ones."""

from __future__ import annotations

import json
import socket
import threading
import time
import uuid
from pathlib import Path

import psutil
import pytest

from megatron_tlt.config.task import TaskConfig
from megatron_tlt.rewards import code, sandbox, verifiers
from megatron_tlt.rewards.code import verify
from megatron_tlt.rewards.pool import RewardPool
from megatron_tlt.rewards.sandbox import SandboxLimits, run_sandboxed, sandbox_problem
from megatron_tlt.tasks.types import Problem

needs_sandbox = pytest.mark.skipif(sandbox_problem() is not None, reason=f"no sandbox: {sandbox_problem()}")
ADD = "assert add(1, 2) == 3\nassert add(-1, 1) == 0"
ECHO = json.dumps({"inputs": ["3\n", "5\n"], "outputs": ["6\n", "10"]})


def problem(answer: str) -> Problem:
    return Problem("p", "code", "write it", answer, "code")


def said(program: str) -> str:
    return f"Let me think.\n```python\nwrong = 1\n```\nBetter:\n```python\n{program}\n```\nDone."


@needs_sandbox
@pytest.mark.parametrize(
    ("program", "answer", "right"),
    [
        ("def add(a, b):\n    return a + b", ADD, True),
        ("def add(a, b):\n    return abs(a) + b", ADD, False),
        ("def add(a, b) return", ADD, False),
        ("print(2 * int(input()))", ECHO, True),
        ("print(6)", ECHO, False),
        ("import sys\nprint(2 * int(sys.stdin.read()), end='  \\n\\n')", ECHO, True),
    ],
)
def test_tests_decide(program: str, answer: str, right: bool) -> None:
    found = verify(problem(answer), said(program))
    assert found.correct == right and found.value == float(right) and found.extracted == program + "\n"


def test_a_response_without_a_program_is_wrong() -> None:
    found = verify(problem(ADD), "def add(a, b): return a + b")
    assert not found.correct and found.extracted is None


@needs_sandbox
@pytest.mark.parametrize("early", ["import sys; sys.exit(0)", "import os; os._exit(0)", "raise SystemExit"])
def test_a_program_that_ends_before_the_tests_is_wrong(early: str) -> None:
    assert not verify(problem(ADD), said(f"def add(a, b):\n    return 3\n{early}")).correct


HOSTILE = {
    "fork bomb": "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
    "threads": "import threading, time\nwhile True:\n    threading.Thread(target=time.sleep, args=(60,)).start()",
    "10 GB": "held = bytearray(10 << 30)\nprint('held')",
    "endless loop": "while True: pass",
    "endless output": "while True: print('x' * 10000)",
    "a large file": "with open('/tmp/f', 'wb') as f:\n    while True: f.write(b'x' * (1 << 20))",
}


@needs_sandbox
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_program_ends_as_wrong_and_leaves_nothing(name: str) -> None:
    before, began = _processes(), time.monotonic()
    found = verify(problem(ADD), said(HOSTILE[name] + f"\n# {uuid.uuid4()}"))
    assert not found.correct and time.monotonic() - began < SandboxLimits.seconds + 4
    assert not _processes() - before
    assert psutil.virtual_memory().available > 1 << 30


def _processes() -> set[int]:
    """Processes that a sandbox started."""
    found = set()
    for process in psutil.process_iter(["pid", "cmdline"]):
        if any("/tmp/program.py" in part for part in process.info["cmdline"] or ()):
            found.add(process.info["pid"])
    return found


@needs_sandbox
def test_processes_are_bounded_while_it_runs() -> None:
    most: list[int] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.1):
            most.append(len(_processes()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    run_sandboxed(HOSTILE["fork bomb"], limits=SandboxLimits(seconds=2))
    ended.set()
    watcher.join()
    assert 2 < max(most) <= SandboxLimits.processes + 5


@needs_sandbox
def test_it_reaches_no_socket_and_no_file_of_the_host(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("known")
    tmp_path.chmod(0o755)
    written = tmp_path / "written"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        tries = {
            "socket": f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)",
            "name": "import socket; socket.getaddrinfo('pypi.org', 443)",
            "read": f"open({str(secret)!r}).read()",
            "home": "import os; assert os.listdir(os.path.expanduser('~root'))",
            "write": f"open({str(written)!r}, 'w').write('x')",
            "system": "open('/usr/lib/x', 'w')",
            "environment": "import os; assert len(os.environ) > 6",
        }
        results = {name: run_sandboxed(code).succeeded for name, code in tries.items()}
    assert not any(results.values()), results
    assert not written.exists()


@needs_sandbox
def test_the_reward_pool_survives_hostile_answers() -> None:
    with RewardPool(2, 10.0, ["code"]) as pool:
        programs = ["def add(a, b):\n    return a + b", *list(HOSTILE.values())[:3]]
        for key, program in enumerate(programs):
            pool.submit(key, problem(ADD), said(program))
        rewards = pool.collect()
        assert [rewards[key].correct for key in range(4)] == [True, False, False, False]
        assert pool.counts.deaths == 0 and all(reward.error is None for reward in rewards.values())


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (ADD, None),
        (ECHO, None),
        ("assert add(1, 2 == 3", "neither JSON nor Python"),
        ("# nothing", "no test"),
        ('{"inputs": ["1"], "outputs": []}', "of equal length"),
        ('{"inputs": [1], "outputs": ["1"]}', "not all texts"),
    ],
)
def test_answers_that_are_no_tests_are_named(answer: str, reason: str | None) -> None:
    found = code.tests_problem(answer)
    assert (found is None) if reason is None else (reason in str(found))
    assert verifiers.answer_problem("code", answer) == found


def test_without_a_sandbox_the_config_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox.shutil, "which", lambda tool: None)
    sandbox_problem.cache_clear()
    try:
        task = TaskConfig(kind="file", name="mine", path=Path("p.jsonl"), verifier="code")
        (line,) = verifiers.verifier_problems([task])
    finally:
        sandbox_problem.cache_clear()
    assert line.startswith(
        "tasks[0].verifier: found 'code', which runs programs in a sandbox; there is no bwrap; install"
    )

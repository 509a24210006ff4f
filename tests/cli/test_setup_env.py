"""tools/setup_env.sh on a scratch copy whose only requirement is setuptools: real venv, real pip."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for name in ("tools/setup_env.sh", "tests/run.sh", "launch/quickstart.sh", "setup.cfg", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for file in (ROOT / "requirements").glob("*.txt"):
        (tmp_path / "requirements").mkdir(exist_ok=True)
        (tmp_path / "requirements" / file.name).write_text("# empty\n")
    # The editable install needs the pinned setuptools; the one that comes with Python is too old.
    lock = (ROOT / "requirements/cpu.txt").read_text().splitlines()
    pin = next(line for line in lock if line.startswith("setuptools=="))
    (tmp_path / "requirements/cpu.txt").write_text(f"{pin}\n")
    (tmp_path / "megatron_tlt").mkdir()
    (tmp_path / "megatron_tlt" / "__init__.py").write_text('__version__ = "0"\n')
    return tmp_path


def set_up(copy: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    python = getattr(sys, "_base_executable", sys.executable)
    return subprocess.run(
        ["bash", str(copy / "launch/quickstart.sh"), "--setup-only"],
        cwd="/",
        env={**os.environ, "TLT_PYTHON": python, "TLT_STACK": "cpu", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def old_python(copy: Path) -> Path:
    """A program that answers as an unsupported interpreter does."""
    path = copy / "python3"
    path.write_text("#!/bin/sh\necho 3.9.2\n")
    path.chmod(0o755)
    return path


def test_unsupported_python_is_refused_by_name(copy: Path) -> None:
    python = old_python(copy)
    done = set_up(copy, TLT_PYTHON=str(python))
    assert done.returncode == 2
    assert f"found Python 3.9.2 at {python}; Python 3.11 or 3.12 is needed" in done.stderr
    assert not (copy / ".venv").exists()


def test_unknown_stack_is_refused(copy: Path) -> None:
    done = set_up(copy, TLT_STACK="tpu")
    assert done.returncode == 2 and "allowed: cpu, gpu" in done.stderr


@pytest.mark.parametrize("content", ["echo 3.11.99", "echo 3.9.2", "exit 1"])
def test_an_environment_it_did_not_make_is_never_removed(copy: Path, content: str) -> None:
    """Another Python in .venv, even a broken one, is a reason to refuse: somebody may be working in it."""
    interpreter = copy / ".venv/bin/python"
    interpreter.parent.mkdir(parents=True)
    interpreter.write_text(f"#!/bin/sh\n{content}\n")
    interpreter.chmod(0o755)
    (copy / ".venv/.installing").touch()
    done = set_up(copy)
    assert done.returncode == 2 and "remove .venv" in done.stderr
    assert interpreter.read_text() == f"#!/bin/sh\n{content}\n"


def test_transformer_engine_is_installed_on_request_alone(copy: Path) -> None:
    """The GPU stack's other parts must not fail because this one has to be compiled."""
    shutil.copy(copy / "requirements/cpu.txt", copy / "requirements/gpu.txt")
    (copy / "requirements/transformer-engine.txt").write_text("no-such-package-of-ours==1\n")
    refused = set_up(copy, TLT_STACK="gpu", TLT_TRANSFORMER_ENGINE="maybe")
    assert refused.returncode == 2 and "TLT_TRANSFORMER_ENGINE=maybe; allowed: yes, no" in refused.stderr
    done = set_up(copy, TLT_STACK="gpu")
    assert done.returncode == 0 and "TLT_TRANSFORMER_ENGINE=yes installs it" in done.stdout, done.stderr
    asked = set_up(copy, TLT_STACK="gpu", TLT_TRANSFORMER_ENGINE="yes")
    assert asked.returncode != 0 and "no-such-package-of-ours" in asked.stderr


def test_set_up_second_call_and_interruption(copy: Path) -> None:
    done = set_up(copy)
    assert done.returncode == 0, done.stderr
    assert (copy / ".venv/.stamp").exists() and not (copy / ".venv/.installing").exists()

    started = time.monotonic()
    again = set_up(copy)
    assert again.returncode == 0 and "ready: cpu stack" in again.stdout
    assert time.monotonic() - started < 5

    (copy / ".venv/.stamp").unlink()
    (copy / ".venv/.installing").touch()
    (copy / ".venv/half-installed").touch()
    resumed = set_up(copy)
    assert resumed.returncode == 0 and "starting over" in resumed.stdout
    assert not (copy / ".venv/half-installed").exists()

    (copy / "requirements/gpu.txt").write_text("# changed\n")
    changed = set_up(copy)
    assert changed.returncode == 0 and "done in" in changed.stdout

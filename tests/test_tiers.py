"""pytest takes every command of tests/run.sh; one call of that script runs those of one tier only."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
CALL = "python -m pytest "


def commands() -> list[str]:
    text = (TESTS / "run.sh").read_text(encoding="utf-8")
    found = re.search(r"^two_at_a_time=\((.*)\)$", text, re.MULTILINE)
    assert found is not None
    lines = text.replace('"${two_at_a_time[@]}"', found[1]).splitlines()
    return [line.partition(CALL)[2] for line in lines if CALL in line and "arguments[@]" not in line]


@pytest.mark.parametrize(("limit", "said"), [("1", "1 skipped"), ("9999999999", "1 passed")])
def test_a_test_that_would_start_after_the_limit_is_named(limit: str, said: str, tmp_path: Path) -> None:
    left_out = tmp_path / "left_out"
    left_out.touch()
    test = "tests/platform/test_membership.py::test_a_launcher_that_is_told_to_stop_waits_no_longer"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
    given = {**os.environ, "TLT_NO_TEST_AFTER": limit, "TLT_LEFT_OUT": str(left_out)}
    done = subprocess.run(command, cwd=TESTS.parent, env=given, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and said in done.stdout, done.stdout
    assert left_out.read_text().splitlines() == ([test] if "skipped" in said else [])


@pytest.mark.parametrize("given", [["--within"], ["--within", "soon"], ["--all", "--within", "0"]])
def test_a_limit_is_a_number_of_minutes(given: list[str]) -> None:
    command = ["bash", str(TESTS / "run.sh"), *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "error: --within: found" in done.stderr


@pytest.mark.parametrize("arguments", commands())
def test_pytest_takes_the_arguments(arguments: str) -> None:
    with tempfile.NamedTemporaryFile() as file:  # for a variable
        given = [file.name if "$" in argument else argument for argument in shlex.split(arguments)]
        command = [sys.executable, "-m", "pytest", *given, "--markers"]  # collects nothing
        done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "representative(kind)" in done.stdout, done.stderr


STUB = """#!/usr/bin/env bash
if [[ "$*" == *"pip install"*triton* ]]; then exit 1; fi
if [[ "$*" == *"pip install"* ]]; then mkdir -p "$7/verifiers"; fi
if [[ "$*" == *"-m pytest"* ]]; then echo "tests/rollout/test_x.py: no triton" >>"$TLT_SKIPPED"; fi
"""


@pytest.fixture
def stubbed(tmp_path: Path) -> Path:
    """The script in a repository of its own where every check passes and pip does not find triton."""
    for name in ("tests", "tools", ".venv/bin"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "tests" / "run.sh").write_text((TESTS / "run.sh").read_text(encoding="utf-8"))
    (tmp_path / "tests" / "system_packages.sh").write_text("system_packages() { :; }\n")
    (tmp_path / "tools" / "setup_env.sh").write_text("setup_env() { :; }\n")
    for name in ("python", "ruff", "codespell", "proselint", "mypy", "shellcheck"):
        (tmp_path / ".venv" / "bin" / name).write_text(STUB)
        (tmp_path / ".venv" / "bin" / name).chmod(0o755)
    return tmp_path / "tests" / "run.sh"


@pytest.mark.parametrize("allowed", ["", "1"])
def test_a_library_that_only_some_tests_need_must_be_there(allowed: str, stubbed: Path) -> None:
    given = {**os.environ, "TLT_ALLOW_SKIPS": allowed}
    for arguments in (["--all"], ["--all", "--setup-only"]):
        done = subprocess.run(["bash", str(stubbed), *arguments], env=given, capture_output=True, text=True, timeout=60)
        assert done.returncode == (0 if allowed else 1), done.stdout + done.stderr
        assert "pip could not install triton" in done.stdout + done.stderr
        assert "verifiers;" not in done.stdout + done.stderr
        if "--setup-only" not in arguments:
            assert ("All checks passed." if allowed else "FAILED: set-up of triton") in done.stdout
            assert "3 tests/rollout/test_x.py: no triton" in done.stdout


def test_skipped_tests_are_listed_with_their_reasons(tmp_path: Path) -> None:
    test = TESTS / "rollout" / "test_runner_v2.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"{test}", "-k", "heads_responses"]
    given = {key: value for key, value in os.environ.items() if key != "TLT_NO_TEST_AFTER"}
    given |= {"TLT_SKIPPED": str(tmp_path / "skipped"), "TLT_TRITON": str(tmp_path)}
    done = subprocess.run(command, cwd=TESTS.parent, env=given, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
    lines = (tmp_path / "skipped").read_text().splitlines()
    assert len(lines) == 2 and len({*lines}) == 1
    assert lines[0].startswith(f"tests/rollout/test_runner_v2.py: no triton in {tmp_path}")

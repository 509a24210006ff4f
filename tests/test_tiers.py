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

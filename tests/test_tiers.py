"""pytest takes every command of tests/run.sh; one call of that script runs those of one tier only."""

from __future__ import annotations

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


@pytest.mark.parametrize("arguments", commands())
def test_pytest_takes_the_arguments(arguments: str) -> None:
    with tempfile.NamedTemporaryFile() as file:  # for a variable
        given = [file.name if "$" in argument else argument for argument in shlex.split(arguments)]
        command = [sys.executable, "-m", "pytest", *given, "--markers"]  # collects nothing
        done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "representative(kind)" in done.stdout, done.stderr

"""Each mended bug of the GPU path, put back, is found by a test that needs no GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.helpers.launch import REPOSITORY
from tests.helpers.put_back import BUGS


@pytest.mark.slow(300)
@pytest.mark.parametrize("name", BUGS)
def test_a_bug_that_is_put_back_is_found(name: str) -> None:
    bug = BUGS[name]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--put-back", name, bug.tests]
    environment = {key: value for key, value in os.environ.items() if key != "TLT_NO_TEST_AFTER"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 1, f"{bug.tests} does not find it:\n{done.stdout[-3000:]}{done.stderr[-1000:]}"
    assert bug.says in done.stdout, done.stdout[-3000:]


def test_what_cannot_be_put_back_is_refused() -> None:
    command = [sys.executable, "-m", "pytest", "--put-back", "none", "tests/test_tiers.py"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=100)
    assert done.returncode == 4 and all(name in done.stderr for name in BUGS)

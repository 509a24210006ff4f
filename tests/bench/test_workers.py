"""How benchmarks start processes of their own, and what they say of ones that fail."""

from __future__ import annotations

import pytest

from megatron_tlt.bench.workers import run_worker
from megatron_tlt.errors import RunError


def test_a_worker_that_fails_is_named_with_its_traceback() -> None:
    with pytest.raises(RunError, match=r"(?s)without arguments: status 1.*TypeError: main\(\) missing 3 required"):
        run_worker("without arguments", "gap", [], 1, 120.0)


def test_a_worker_that_takes_too_long_is_given_up() -> None:
    with pytest.raises(RunError, match=r"too long: still running after 0\.5 s"):
        run_worker("too long", "gap", [], 1, 0.5)

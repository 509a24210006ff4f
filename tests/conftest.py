"""Options, markers and the environment that all tests share.

Tests run in two tiers. `bash tests/run.sh` runs the contributor's tier: every test that is neither `distributed` nor
`slow`, and every test marked `representative`. `bash tests/run.sh --all` runs all tests.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from megatron_tlt.bench.fault_parts import disks
from tests.helpers import put_back

# before any test module imports torch or vLLM; subprocesses inherit it
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background job; subprocesses inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

# a busy machine is no failure
settings.register_profile("tlt", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tlt")

_MARKERS = (
    "slow(seconds=0): takes long; only `tests/run.sh --all` runs it, those that say how long before the others",
    "distributed: starts several processes; only `tests/run.sh --all` runs it, unless it is marked representative",
    "representative(kind): stands for its kind; the contributor's tier runs it although it is distributed or slow",
    "cpu_patch: losslessness at temperature > 0; on CPU builds it must fail without megatron_tlt.rollout.vllm_patches",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--without-cpu-patch",
        action="store_true",
        help="take the patch of vLLM's CPU rejection sampler out, run only the tests that need it, expect them to fail",
    )
    parser.addoption(
        "--put-back",
        metavar="BUG",
        choices=sorted(put_back.BUGS),
        help="put a mended bug of the GPU path back: tests that find it must fail (tests/helpers/put_back.py)",
    )


_LEFT_OUT = pytest.StashKey[int]()
"""How many of the collected tests are not in the contributor's tier."""
_SKIPPED = pytest.StashKey[str]()
"""The file of tests/run.sh for skipped tests; not for sessions that tests start."""
_TOO_LATE = "the time of tests/run.sh --within is over"


def pytest_configure(config: pytest.Config) -> None:
    for marker in _MARKERS:
        config.addinivalue_line("markers", marker)
    if config.getoption("--without-cpu-patch"):
        os.environ["TLT_WITHOUT_CPU_PATCH"] = "1"
    if bug := config.getoption("--put-back"):
        os.environ[put_back.ENVIRONMENT] = bug
    config.stash[_SKIPPED] = os.environ.pop("TLT_SKIPPED", "")


@pytest.hookimpl(tryfirst=True)  # before -m deselects tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Fast tests first: plain, then those that start processes, then slow ones (stable within each)."""
    config.stash[_LEFT_OUT] = sum(not _in_contributors_tier(item) for item in items)
    items.sort(key=lambda item: (item.get_closest_marker("slow") is not None, _starts_processes(item), -_seconds(item)))
    if not config.getoption("--without-cpu-patch"):
        return
    patched = [item for item in items if item.get_closest_marker("cpu_patch")]
    config.hook.pytest_deselected(items=[item for item in items if item not in patched])
    items[:] = patched
    for item in items:
        item.add_marker(pytest.mark.xfail(reason="the CPU patch was taken out", raises=AssertionError, strict=True))


@pytest.hookimpl(tryfirst=True)  # before fixtures are built
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips what would start too late, if there is a limit (``tests/run.sh --within``), and names it in a file."""
    limit = os.environ.get("TLT_NO_TEST_AFTER")
    if limit and time.time() > float(limit):
        with open(os.environ["TLT_LEFT_OUT"], "a", encoding="utf-8") as left_out:
            left_out.write(f"{item.nodeid}\n")
        pytest.skip(_TOO_LATE)


def pytest_sessionstart() -> None:  # before test modules import what it replaces
    put_back.install_from_environment()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    # pytest-xdist collects in its workers, whose count this process does not see
    if config.option.markexpr == "representative" and _LEFT_OUT in config.stash:
        terminalreporter.line(f"The contributor's tier leaves {config.stash[_LEFT_OUT]} tests to tests/run.sh --all.")
    if file := config.stash.get(_SKIPPED, ""):
        with open(file, "a", encoding="utf-8") as skipped:
            for report in terminalreporter.stats.get("skipped", ()):
                reason = " ".join(report.longrepr[2].removeprefix("Skipped: ").split())
                if reason != _TOO_LATE:  # these are in the list of their own
                    skipped.write(f"{report.nodeid.partition('::')[0]}: {reason}\n")


def _seconds(item: pytest.Item) -> float:
    """What a slow test says that it takes; the longest of two workers' tests must not be the last."""
    marker = item.get_closest_marker("slow")
    return marker.args[0] if marker is not None and marker.args else 0.0


def _starts_processes(item: pytest.Item) -> bool:
    return item.get_closest_marker("distributed") is not None


def _in_contributors_tier(item: pytest.Item) -> bool:
    marked = {marker.name for marker in item.iter_markers()}
    return "representative" in marked or not marked & {"distributed", "slow"}


@contextlib.contextmanager
def mounted(folder: Path, size: str) -> Iterator[Path]:
    """A real file system of ``size``; skips where that is not allowed."""
    with contextlib.ExitStack() as stack:
        try:
            disk = stack.enter_context(disks.mounted(folder, size))
        except disks.NotPossible as error:
            pytest.skip(str(error))
        yield disk


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 256 KiB."""
    with mounted(tmp_path / "disk", "256k") as disk:
        yield disk

"""A checkpoint counts as published once it has its name; every failure before that is an error of the run."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from megatron_tlt.checkpoint.files import find_latest_whole
from megatron_tlt.checkpoint.publication import Publication, publication_threads
from megatron_tlt.errors import RunError
from tests.conftest import mounted
from tests.helpers.launch import run_python

THREADS = publication_threads()


def publish(folder: Path, keep: int) -> None:
    publication = Publication(folder, keep)
    (publication.temporary / "state.json").write_text("{}")
    publication.start(THREADS)
    deadline = time.monotonic() + 20
    while not publication.done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_older_ones_are_removed(tmp_path: Path) -> None:
    for step in range(1, 5):
        publish(tmp_path / f"step_{step}", keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_3", "step_4"]


def test_one_that_cannot_be_removed_is_a_warning(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    publish(tmp_path / "step_1", keep=2)
    publish(tmp_path / "step_2", keep=2)
    with mounted(tmp_path / "step_1" / "busy", "1m"):  # a mount point cannot be removed, not even by root
        publish(tmp_path / "step_3", keep=2)
        publish(tmp_path / "step_4", keep=2)
    assert find_latest_whole(tmp_path) == (tmp_path / "step_4", [])
    assert not (tmp_path / "step_2").exists()  # the next one is removed all the same
    warnings = [line for line in capfd.readouterr().err.splitlines() if "step_1" in line]
    assert len(warnings) == 2 and warnings[0].startswith("warning: ") and "cannot remove" in warnings[0]
    publish(tmp_path / "step_5", keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step_4", "step_5"]


@pytest.mark.parametrize("error", [OSError(5, "broken disk"), MemoryError("broken disk")])
def test_any_failure_of_its_thread_is_an_error_of_the_run(
    tmp_path: Path, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> object:
        raise error

    publish(tmp_path / "step_1", keep=2)
    monkeypatch.setattr("megatron_tlt.checkpoint.publication.set_latest", broken)
    with pytest.raises(RunError, match=r"step_2.*broken disk"):
        publish(tmp_path / "step_2", keep=2)


@pytest.mark.parametrize(
    ("when", "said"),
    [
        ("after", r"^published$"),
        ("before", r"^error: thread 'publish' not started: can't start new thread; needed: more memory or threads \("),
    ],
)
def test_a_memory_limit_hits_the_start_of_a_run_and_no_checkpoint(tmp_path: Path, when: str, said: str) -> None:
    worker = Path(__file__).parent / "workers" / "short_memory.py"
    found = run_python(worker, [str(tmp_path), when], timeout_s=60, fresh=True)
    assert re.search(said, found, re.MULTILINE), found

"""What killed processes left behind is removed; what a live or unknown process writes is not."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_tlt.checkpoint.files import atomic_folder
from megatron_tlt.checkpoint.leftovers import clean_leftovers
from megatron_tlt.platform.files import temporary_sibling
from megatron_tlt.platform.owner import Owner

DAY_S = 24 * 3600
_WRITER = """
import sys
from pathlib import Path
from megatron_tlt.checkpoint.files import atomic_folder
with atomic_folder(Path(sys.argv[1])) as folder:
    (folder / "weights").write_text("half")
    print("writing", flush=True)
    input()
    (folder / "weights").write_text("whole")
"""


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@contextmanager
def writer(target: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process, in the middle of writing the folder ``target``; a line to its input lets it finish."""
    with subprocess.Popen([sys.executable, "-c", _WRITER, str(target)], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        yield process
        process.kill()


def leftover(target: Path, owner: Owner | str, age_s: float = 0.0, kind: str = "tmp") -> Path:
    """A folder with a file in it, as ``owner`` would have left it."""
    text = owner if isinstance(owner, str) else owner.text
    folder = target.with_name(f".{target.name}.{kind}-{text}-0")
    folder.mkdir()
    (folder / "half").write_text("x")
    for path in (folder / "half", folder):
        os.utime(path, (time.time() - age_s,) * 2)
    return folder


def test_a_folder_that_another_process_writes_is_left_alone(tmp_path: Path) -> None:
    with writer(tmp_path / "step-1") as process:
        assert clean_leftovers(tmp_path) == []
        process.communicate("\n")
        assert process.returncode == 0
    assert names(tmp_path) == ["step-1"]
    assert (tmp_path / "step-1" / "weights").read_text() == "whole"


def test_a_killed_process_leaves_nothing(tmp_path: Path) -> None:
    with writer(tmp_path / "step-1") as process:
        process.kill()
        process.wait()
    assert len(clean_leftovers(tmp_path)) == 1
    assert names(tmp_path) == []


def test_own_files_are_left_alone(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "step-1") as folder:
        (folder / "a").write_text("a")
        temporary_sibling(tmp_path / "latest").write_text("step-1")
        assert clean_leftovers(tmp_path) == []
    assert "step-1" in names(tmp_path)


@pytest.mark.parametrize("owner", [replace(Owner.current(), host="elsewhere-0123456789ab"), "123"])
def test_of_another_host_or_an_older_release_only_after_a_day(
    tmp_path: Path, owner: Owner | str, caplog: pytest.LogCaptureFixture
) -> None:
    fresh = leftover(tmp_path / "step-1", owner, age_s=0.9 * DAY_S)
    old = leftover(tmp_path / "step-2", owner, age_s=1.1 * DAY_S)
    with caplog.at_level(logging.WARNING):
        assert clean_leftovers(tmp_path) == [old]
    assert names(tmp_path) == [fresh.name]
    (record,) = caplog.records
    assert str(fresh) in record.getMessage() and "kept: " in record.getMessage()
    (fresh / "half").write_text("more")  # the folder itself looks old, but something in it changed
    assert clean_leftovers(tmp_path) == []


def test_a_folder_being_replaced_is_put_back_only_for_a_dead_process(tmp_path: Path) -> None:
    dead = replace(Owner.current(), started=Owner.current().started - 1)
    leftover(tmp_path / "step-1", dead, kind="old")
    live = leftover(tmp_path / "step-2", Owner.current(), kind="old")
    clean_leftovers(tmp_path)
    assert names(tmp_path) == sorted([live.name, "step-1"])


def test_only_what_belongs_to_a_name(tmp_path: Path) -> None:
    """A conversion removes what an earlier one to the same target left, and nothing else in that folder."""
    dead = replace(Owner.current(), started=Owner.current().started - 1)
    other = leftover(tmp_path / "other", dead)
    own = leftover(tmp_path / "target", dead)
    assert clean_leftovers(tmp_path, "target") == [own]
    assert names(tmp_path) == [other.name]


def test_other_hidden_files_and_no_folder(tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text("*")
    assert clean_leftovers(tmp_path) == [] == clean_leftovers(tmp_path / "none")
    assert names(tmp_path) == [".gitignore"]

"""The folder in memory of a launch: where it is, and what becomes of those that killed launches left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_tlt.errors import ConfigError
from megatron_tlt.platform.memory_folder import memory_folder, memory_folder_of

_KILLED = """
import os, signal, sys
from pathlib import Path
from megatron_tlt.platform.memory_folder import memory_folder
with memory_folder(Path(sys.argv[1]), Path("another"), 0):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_launch_has_a_folder_of_its_own_until_its_end(tmp_path: Path) -> None:
    places = {memory_folder_of(tmp_path, Path(run), node) for run in ("a", "b") for node in (0, 1)}
    assert len(places) == 4
    with memory_folder(tmp_path, Path("a"), 1) as folder:
        assert folder == memory_folder_of(tmp_path, Path("a"), 1) and folder.stat().st_mode & 0o777 == 0o700
        with memory_folder(tmp_path, Path("b"), 1) as other:
            assert folder.is_dir() and other.is_dir() and other != folder
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_launch_left_is_removed_by_the_next(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path)], check=False, timeout=60)
    assert ended.returncode == -signal.SIGKILL and len(list(tmp_path.iterdir())) == 1
    with memory_folder(tmp_path, Path("a"), 0) as folder:
        assert list(tmp_path.iterdir()) == [folder]


def test_a_place_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with (
        pytest.raises(ConfigError, match=r"elastic\.memory_dir: found .*file"),
        memory_folder(tmp_path / "file", Path("a"), os.getpid()),
    ):
        pass

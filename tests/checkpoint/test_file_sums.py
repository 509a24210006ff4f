"""Any change of the files that have sums is found and named."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_tlt.checkpoint.file_sums import SUMS, check_file_sums, write_file_sums
from megatron_tlt.errors import RunError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rng" / "rank_00000").mkdir(parents=True)
    (tmp_path / "rng" / "rank_00000" / "state.json").write_text("{}")
    (tmp_path / "common.pt").write_bytes(b"abc")
    (tmp_path / "blocks.bin").write_bytes(b"large")
    write_file_sums(tmp_path, leave_out=("blocks.bin",))
    return tmp_path


def test_what_is_as_it_was_passes_and_sums_can_be_written_again(folder: Path) -> None:
    check_file_sums(folder)
    (folder / "blocks.bin").write_bytes(b"other")
    check_file_sums(folder)
    (folder / "common.pt").write_bytes(b"xyz")
    write_file_sums(folder, leave_out=("blocks.bin",))
    check_file_sums(folder)


@pytest.mark.parametrize("name", ["common.pt", "rng/rank_00000/state.json", SUMS])
def test_a_file_that_was_removed_or_changed_is_named(name: str, folder: Path) -> None:
    file = folder / name
    data = bytearray(file.read_bytes())
    data[0] ^= 1
    file.write_bytes(data)
    with pytest.raises(RunError, match=name):
        check_file_sums(folder)
    file.unlink()
    with pytest.raises(RunError, match=f"{name}: not readable"):
        check_file_sums(folder)

"""Work that ranks share; with several ranks: tests/trainer/test_checkpoints.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_tlt.checkpoint.manifest import verify_manifest
from megatron_tlt.checkpoint.shared import run_together, shared_folder, with_shared_sums
from megatron_tlt.errors import RunError


def test_failure_of_the_file_system_is_an_error_of_the_run(tmp_path: Path) -> None:
    assert run_together(lambda: 3) == 3
    with pytest.raises(RunError, match=r"cannot access .*nothing: No such file"):
        run_together(lambda: (tmp_path / "nothing").read_text())
    with pytest.raises(RunError, match=r"cannot access .*nothing: No such file"):
        with_shared_sums(lambda sums: [p.name for p in (tmp_path / "nothing").iterdir()], list[str])


def test_folder_has_a_manifest_or_is_not_there(tmp_path: Path) -> None:
    with shared_folder(tmp_path / "model") as folder:
        (folder / "weights").write_text("x")
    assert verify_manifest(tmp_path / "model") == []
    with pytest.raises(ValueError, match="broken"), shared_folder(tmp_path / "other") as folder:
        (folder / "weights").write_text("x")
        raise ValueError("broken")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]

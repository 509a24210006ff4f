"""What a checkpoint that cannot be written or read says; that it holds is shown in test_layouts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.launch import run_python
from tests.helpers.tiny_models import build_qwen2

pytestmark = pytest.mark.distributed


def test_full_disk_and_damage_are_one_line(tmp_path: Path, tiny_disk: Path) -> None:
    model = build_qwen2(tmp_path / "model", num_heads=2, num_kv_heads=2)
    good = tmp_path / "good"
    good.mkdir()
    worker = Path(__file__).parent / "workers" / "full_disk.py"
    # without imports, for all of this folder: a policy's worker imports what it needs
    log = run_python(worker, [str(model), str(tiny_disk), str(good)], fresh=True)
    said = {line.split(":")[0]: line for line in log.splitlines() if line.startswith(("FULL:", "DAMAGED:", "EMPTY:"))}
    assert f"disk full: cannot write {tiny_disk}" in said["FULL"]
    assert f"{good}: not a readable checkpoint" in said["DAMAGED"]
    assert f"{model}: not a readable checkpoint" in said["EMPTY"]

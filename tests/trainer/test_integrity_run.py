"""A real run with all checks of ``integrity``: its metrics, and a flipped bit that ends it before it is saved."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_tlt.cli import main
from megatron_tlt.config.loader import dump_resolved, load_config
from megatron_tlt.observe.metrics import read_metrics
from tests.helpers.launch import run_torchrun
from tests.trainer.conftest import Runs

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
WORKER = Path(__file__).parent / "workers" / "flipped.py"
CHECKS = ("integrity.replicas_every=1", "integrity.checkpoints=true", "trainer.steps=3")


@pytest.fixture(scope="module")
def checked(runs: Runs) -> Path:
    said = runs.train("checked", *CHECKS)
    assert "warning" not in said
    return runs.folder / "checked"


def test_a_checked_run_is_intact(checked: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row for row in read_metrics(checked / "metrics.jsonl") if row["step"]]
    assert len(rows) == 3
    assert all(row["integrity/replicas_ms"] and row["integrity/odd_ranks"] == 0 for row in rows)
    assert rows[-1]["checkpoint/verified"] == 1
    assert main(["verify", str(checked)]) == 0
    found = capsys.readouterr().out
    assert " 0 damaged" in found and "not verified" not in found


def test_a_flipped_bit_is_not_saved(runs: Runs, checked: Path, tmp_path: Path) -> None:  # whose model it takes
    config = load_config(runs.config, [f"run.dir={tmp_path / 'flipped'}", "trainer.async_save=false", *CHECKS])
    (tmp_path / "config.yaml").write_text(dump_resolved(config))
    said = run_torchrun(WORKER, 2, [str(tmp_path / "config.yaml")], timeout_s=900, expect_status=1)
    assert "after step 2 the actor's weights differ between replicas" in said
    assert "rank 0 on" in said and "rank 1 on" in said and "embedding.word_embeddings.weight" in said
    assert [path.name for path in (tmp_path / "flipped" / "checkpoints").glob("step_*")] == ["step_000001"]

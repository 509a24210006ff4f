"""metrics.jsonl and what lies under it."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_tlt.config.schema import WandbConfig
from megatron_tlt.errors import ConfigError, RunError
from megatron_tlt.observe.jsonl import JsonLinesFile, read_jsonl
from megatron_tlt.observe.metrics import MetricsWriter, read_metrics


def write(folder: Path, steps: range) -> None:
    with MetricsWriter(folder, tensorboard=False) as writer:
        for step in steps:
            writer.log(step, {"reward/mean": step / 10})


def test_rows_are_there_before_close(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, tensorboard=False)
    writer.log(3, {"a": 0.5, "n": 7, "nan": math.nan, "inf": -math.inf})
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    wall_time = row.pop("wall_time")
    assert row == {"step": 3, "a": 0.5, "n": 7, "nan": None, "inf": None}
    assert wall_time is not None and wall_time > 1.7e9
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()
    writer.close()


def test_resume_drops_later_rows(tmp_path: Path) -> None:
    write(tmp_path, range(1, 8))
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        assert writer.truncate_after(4) == 3
        assert writer.truncate_after(4) == 0
        writer.log(5, {"reward/mean": 9.0})
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert rows[-1]["reward/mean"] == 9.0


def test_torn_line_is_dropped_and_repaired(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, range(1, 4))
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    with caplog.at_level(logging.WARNING):
        assert [row["step"] for row in read_metrics(path)] == [1, 2]
    assert "line 3 is incomplete" in caplog.text
    write(tmp_path, range(3, 5))
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3, 4]


@settings(max_examples=15)
@given(
    rows=st.lists(st.dictionaries(st.text(max_size=5), st.floats() | st.text(max_size=5)), max_size=5), data=st.data()
)
def test_cut_anywhere_keeps_the_whole_rows(rows: list[dict[str, object]], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        file = JsonLinesFile(path)
        file.append(rows)
        file.close()
        whole = path.read_bytes()
        cut = data.draw(st.integers(0, len(whole)))
        path.write_bytes(whole[:cut])
        kept = whole[:cut].count(b"\n")
        assert len(read_jsonl(path)) == kept
        again = JsonLinesFile(path)
        again.append([{"step": 1}])
        again.close()
        assert len(read_jsonl(path)) == kept + 1


def test_damage_in_the_middle_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nrubbish\n{"step": 2}\n')
    with pytest.raises(RunError, match=r"metrics\.jsonl: line 2"):
        read_metrics(path)
    path.write_text('{"step": 1}\n[2]\n')
    with pytest.raises(RunError, match="line 2 is a list"):
        read_metrics(path)
    with pytest.raises(RunError, match=r"none\.jsonl"):
        read_metrics(tmp_path / "none.jsonl")


def test_killed_writer_leaves_only_whole_rows(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom megatron_tlt.observe.jsonl import JsonLinesFile\nfile = JsonLinesFile(sys.argv[1])\n"
        "for step in range(10**9):\n"
        "    file.append([{'step': step, 'x': 'y' * 500}])\n"
        "    if step == 50: print('going', flush=True)"
    )
    path = tmp_path / "rows.jsonl"
    writer = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    assert writer.stdout is not None and writer.stdout.readline() == b"going\n"
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    rows = read_jsonl(path)
    assert len(rows) > 50 and [row["step"] for row in rows] == list(range(len(rows)))


def test_full_disk_leaves_no_half_row(tiny_disk: Path) -> None:
    file = JsonLinesFile(tiny_disk / "rows.jsonl")
    file.append([{"step": 1}])
    with pytest.raises(RunError, match=r"disk full: cannot write .*rows\.jsonl: 4000\d\d bytes wanted"):
        file.append([{"step": 2, "x": "y" * 400_000}])
    file.append([{"step": 3}])
    file.close()
    assert [row["step"] for row in read_jsonl(tiny_disk / "rows.jsonl")] == [1, 3]


def test_tensorboard_after_resume_has_each_step_once(tmp_path: Path) -> None:
    pytest.importorskip("torch.utils.tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsWriter(tmp_path) as writer:
        for step in range(1, 6):
            writer.log(step, {"reward/mean": step, "bad": math.nan})
    with MetricsWriter(tmp_path) as writer:
        writer.truncate_after(3)
        for step in range(4, 7):
            writer.log(step, {"reward/mean": 10 * step})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [
        (1, 1),
        (2, 2),
        (3, 3),
        (4, 40),
        (5, 50),
        (6, 60),
    ]
    assert events.Tags()["scalars"] == ["reward/mean"]


def test_wandb_missing_is_a_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # what an import of a package that is not installed meets
    with pytest.raises(ConfigError, match=r"observe\.wandb.*not installed"):
        MetricsWriter(tmp_path, tensorboard=False, wandb=WandbConfig(project="p"))
    MetricsWriter(tmp_path, tensorboard=False).close()


def test_row_is_one_json_line(tmp_path: Path) -> None:
    write(tmp_path, range(2))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1]


def test_damaged_line_in_the_middle_ends_no_resume(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As after a power cut: the file system may lose one page of a file and keep later ones."""
    path = tmp_path / "metrics.jsonl"
    content = b'{"step": 1}\n{"st\0\0\0\0\n{"step": 2}\n[3]\n{"step": 3}\n{"step'
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING), MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.truncate_after(2)
        writer.log(3, {})
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3]
    (record,) = caplog.records
    assert "lines 2, 4, 6 " in record.getMessage() and "metrics.jsonl.damaged" in record.getMessage()
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == content


@pytest.mark.parametrize("sync", [True, False])
def test_rows_are_on_the_disk_before_append_returns(
    tmp_path: Path, sync: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[bytes] = []
    file = JsonLinesFile(tmp_path / "rows.jsonl", sync=sync)
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        synced.append(Path(f"/proc/self/fd/{descriptor}").read_bytes())

    monkeypatch.setattr(os, "fsync", noted)
    file.append([{"step": 1}, {"step": 2}])
    assert synced == ([b'{"step":1}\n{"step":2}\n'] if sync else [])


def test_disk_that_fails_at_the_flush_leaves_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = JsonLinesFile(tmp_path / "rows.jsonl")
    file.append([{"step": 1}])

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as failing:
        failing.setattr(os, "fsync", full)
        with pytest.raises(RunError, match="disk full"):
            file.append([{"step": 2}])
    file.append([{"step": 3}])
    assert [row["step"] for row in read_jsonl(file.path)] == [1, 3]

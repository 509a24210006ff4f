"""The background checkpointer: the newest wins, training never waits or fails, and readers find intact checkpoints."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from megatron_tlt.checkpoint import files, manifest
from megatron_tlt.checkpoint.payload import STATE, Payload
from megatron_tlt.errors import ConfigError, RunError
from megatron_tlt.spot import checkpointer as module
from megatron_tlt.spot.checkpointer import SelectiveCheckpointer, newest
from tests.helpers.launch import REPOSITORY, run_python
from tests.helpers.limits import files_of_at_most
from tests.spot.workers.killed_writers import KIND, payload_at, version_of

WORKERS = Path(__file__).parent / "workers"
LIMIT_S = 60.0


class Gate:
    """Blocks writes until it is opened; ``entered`` is set when a write has reached it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.entered = threading.Event(), threading.Event()
        self.most, self._inside = 0, 0
        write = module.write_payload

        def held(path: Path, payload: Payload) -> None:
            self._inside += 1
            self.most = max(self.most, self._inside)
            self.entered.set()
            assert self.opened.wait(LIMIT_S)
            write(path, payload)
            self._inside -= 1

        monkeypatch.setattr(module, "write_payload", held)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.opened.set()


@contextlib.contextmanager
def checkpointing(folder: Path, keep: int = 2) -> Iterator[SelectiveCheckpointer]:
    made = SelectiveCheckpointer(folder, keep)
    yield made
    assert made.close(LIMIT_S)


def write(folder: Path, *versions: int, keep: int = 2) -> None:
    with checkpointing(folder, keep) as made:
        for version in versions:
            made.save(version, payload_at(version))
            assert made.wait(LIMIT_S)
        assert made.counts.durable_version == versions[-1]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def found_version(folder: Path) -> int | None:
    found = newest(folder, KIND)
    return None if found is None else version_of(found.payload)


class TestSave:
    def test_the_newest_is_kept_and_old_ones_are_removed(self, tmp_path: Path) -> None:
        folder = tmp_path / "deep" / "spot"
        assert newest(folder, KIND) is None
        write(folder, 3, 40, 1000)
        assert names(folder) == ["latest", "version-000000040", "version-000001000"]
        assert (folder / "latest").read_text() == "version-000001000\n"
        found = newest(folder, KIND)
        assert found is not None and found.folder == folder / "version-000001000"
        assert version_of(found.payload) == 1000

    def test_training_may_overwrite_its_tensors_and_numbers_at_once(self, tmp_path: Path, gate: Gate) -> None:
        with checkpointing(tmp_path) as made:
            payload = payload_at(7)
            made.save(7, payload)
            for tensor in payload.tensors.values():
                tensor.fill_(-1.0)
            payload.header["version"] = -1  # type: ignore[index]
            gate.opened.set()
        assert found_version(tmp_path) == 7

    def test_the_newest_waiting_save_is_written_one_at_a_time(self, tmp_path: Path, gate: Gate) -> None:
        with checkpointing(tmp_path, keep=9) as made:
            made.save(1, payload_at(1))
            assert gate.entered.wait(LIMIT_S)
            for version in (2, 3, 4):
                made.save(version, payload_at(version))
            assert not made.wait(0.0)
            assert (made.counts.saves, made.counts.superseded, made.counts.writes) == (4, 2, 0)
            gate.opened.set()
            assert made.wait(LIMIT_S)
            assert (made.counts.writes, made.counts.durable_version) == (2, 4)
        assert names(tmp_path) == ["latest", "version-000000001", "version-000000004"]
        assert found_version(tmp_path) == 4 and gate.most == 1

    def test_it_uses_at_most_two_staging_buffers(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        places = []
        write_payload = module.write_payload

        def noting(path: Path, payload: Payload) -> None:
            places.append(payload.tensors["a"].data_ptr())
            write_payload(path, payload)

        monkeypatch.setattr(module, "write_payload", noting)
        with checkpointing(tmp_path) as made:
            for version in range(12):
                made.save(version, payload_at(version))
                if version % 3:
                    assert made.wait(LIMIT_S)
        assert len(places) >= 8 and len(set(places)) <= 2

    def test_the_last_save_is_the_newest_even_with_a_lower_version(self, tmp_path: Path) -> None:
        write(tmp_path, 50, 60)
        write(tmp_path, 20)  # the run resumed from an earlier state
        assert found_version(tmp_path) == 20

    def test_counts(self, tmp_path: Path) -> None:
        with checkpointing(tmp_path) as made:
            stalls = [made.save(version, payload_at(version)) for version in (1, 2) if made.wait(LIMIT_S)]
            assert made.wait(LIMIT_S)
            counts, nbytes = made.counts, sum(tensor.nbytes for tensor in payload_at(0).tensors.values())
        assert (counts.staged_bytes, counts.written_bytes, counts.failed) == (2 * nbytes, 2 * nbytes, 0)
        assert counts.stall_s == pytest.approx(sum(stalls)) and counts.stall_s > 0 and counts.write_s > 0

    def test_wrong_use_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="keep is 0; allowed: 1 and more"):
            SelectiveCheckpointer(tmp_path, 0)
        with checkpointing(tmp_path) as made:
            with pytest.raises(ValueError, match="version is -1"):
                made.save(-1, payload_at(0))
            with pytest.raises(TypeError):
                made.save(1, Payload(KIND, {"tensor": torch.ones(1)}, {}))
        with pytest.raises(RunError, match="closed"):
            made.save(1, payload_at(1))
        assert made.close(0.0) and names(tmp_path) == []


class TestFailure:
    def expect_one_failure(self, folder: Path, reason: str, caplog: pytest.LogCaptureFixture) -> None:
        """Save version 2, which fails and is logged once; version 1 remains."""
        with checkpointing(folder) as made:
            made.save(2, payload_at(2))
            assert made.wait(LIMIT_S)
            counts = made.counts
        assert (counts.failed, counts.writes, counts.durable_version) == (1, 0, None)
        assert counts.problem is not None and reason in counts.problem and ".tmp-" not in counts.problem
        assert [record.message for record in caplog.records] == [counts.problem]

    def test_a_file_size_limit_keeps_earlier_checkpoints(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        write(tmp_path, 1)
        before = names(tmp_path)
        with files_of_at_most(100_000):
            self.expect_one_failure(tmp_path, "File too large", caplog)
        assert names(tmp_path) == before and found_version(tmp_path) == 1
        write(tmp_path, 3)
        assert found_version(tmp_path) == 3

    def test_a_full_disk_leaves_nothing(self, tiny_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
        self.expect_one_failure(tiny_disk / "spot", "disk full: cannot write", caplog)
        assert names(tiny_disk / "spot") == []

    def test_a_disk_that_fills_up_during_the_write(
        self, tiny_disk: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("megatron_tlt.checkpoint.files.free_bytes", lambda path: None)  # nothing known before
        self.expect_one_failure(tiny_disk / "spot", "disk full: cannot write", caplog)
        assert names(tiny_disk / "spot") == []

    def test_a_folder_that_cannot_be_made(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        (tmp_path / "file").write_text("")
        self.expect_one_failure(tmp_path / "file", "cannot write", caplog)

    def test_a_folder_that_disappears_is_made_again(self, tmp_path: Path) -> None:
        folder = tmp_path / "spot"
        with checkpointing(folder) as made:
            made.save(1, payload_at(1))
            assert made.wait(LIMIT_S)
            shutil.rmtree(folder)
            made.save(2, payload_at(2))
            assert made.wait(LIMIT_S) and made.counts.failed == 0
        assert found_version(folder) == 2

    def test_training_continues_without_staging_memory(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        with checkpointing(tmp_path) as made:
            made.save(1, Payload(KIND, {}, {"huge": torch.zeros(1).expand(1 << 46)}))
            assert made.counts.failed == 1 and "memory" in caplog.text
            made.save(2, payload_at(2))
        assert found_version(tmp_path) == 2


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "flipped": lambda folder: flip_a_bit(folder / STATE),
    "cut": lambda folder: (folder / STATE).write_bytes((folder / STATE).read_bytes()[:-1]),
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "torn manifest": lambda folder: (folder / "manifest.json").write_text('{"format": 1, "fi'),
    "no state": lambda folder: (folder / STATE).unlink(),
}


class TestNewest:
    @pytest.mark.parametrize("damage", DAMAGES)
    def test_a_damaged_one_is_skipped(self, damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        write(tmp_path, 1, 2)
        DAMAGES[damage](tmp_path / "version-000000002")
        assert found_version(tmp_path) == 1
        (record,) = caplog.records
        assert record.levelno == logging.WARNING and "version-000000002 is not complete" in record.message
        DAMAGES[damage](tmp_path / "version-000000001")
        assert newest(tmp_path, KIND) is None

    def test_without_the_pointer_the_highest_version_is_read(self, tmp_path: Path) -> None:
        write(tmp_path, 9, 10)
        (tmp_path / "latest").unlink()
        assert found_version(tmp_path) == 10

    def test_another_kind_is_refused(self, tmp_path: Path) -> None:
        write(tmp_path, 1)
        with pytest.raises(ConfigError, match=r"its format is 'test\.v1'; allowed: 'other\.v1'"):
            newest(tmp_path, "other.v1")

    @pytest.mark.parametrize("moment", ["verify_manifest", "_sha256", "read_payload"])
    def test_a_newer_checkpoint_replaces_the_one_being_read(
        self, moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        write(tmp_path, 1)
        place = {"read_payload": module, "verify_manifest": files, "_sha256": manifest}[moment]
        act, calls = getattr(place, moment), itertools.count()

        def too_late(*args: object, **options: object) -> object:
            if next(calls) == 0:
                with monkeypatch.context() as writing:
                    writing.setattr(place, moment, act)
                    write(tmp_path, 2, keep=1)
                assert names(tmp_path) == ["latest", "version-000000002"]
            return act(*args, **options)

        monkeypatch.setattr(place, moment, too_late)
        assert found_version(tmp_path) == 2 and not caplog.records
        assert next(calls) > 1

    def test_reading_while_another_process_writes(self, tmp_path: Path) -> None:
        """The writer keeps one checkpoint only, so the reader's disappears repeatedly while it reads."""
        worker = [sys.executable, str(WORKERS / "endless_writer.py"), str(tmp_path)]
        writer = subprocess.Popen(worker, env={**os.environ, "PYTHONPATH": str(REPOSITORY)})
        try:
            seen: list[int] = []
            while writer.poll() is None and len(set(seen)) < 25:
                version = found_version(tmp_path)
                if version is not None:
                    seen.append(version)
                assert version is not None or not seen
            assert writer.poll() is None
        finally:
            writer.kill()
            writer.wait()
        assert seen == sorted(seen)


def test_killed_writers_leave_their_durable_checkpoints(tmp_path: Path) -> None:
    kills = 15
    log = run_python(WORKERS / "killed_writers.py", [str(tmp_path), str(kills), "0"], timeout_s=LIMIT_S)
    rows = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    assert len(rows) == kills
    assert all(row["found"] >= row["durable"] for row in rows), rows
    assert len({row["found"] for row in rows}) > kills // 4 and any(row["half_written"] for row in rows), rows
    assert all(row["half_written"] <= 2 for row in rows), rows  # the next writer removes leftovers

"""Checkpoint folders: whole or not there, found again, and a full disk leaves nothing behind."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_tlt.checkpoint.files import (
    atomic_folder,
    find_latest_whole,
    set_latest,
)
from megatron_tlt.checkpoint.leftovers import clean_leftovers
from megatron_tlt.checkpoint.manifest import FileSum, sha256_sums, verify_manifest, write_manifest
from megatron_tlt.errors import RunError
from megatron_tlt.platform.files import atomic_write_bytes, atomic_write_text
from megatron_tlt.platform.owner import Owner


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def save(root: Path, name: str, content: bytes = b"weights") -> Path:
    with atomic_folder(root / name) as folder:
        (folder / "shard").mkdir()
        (folder / "shard" / "0.bin").write_bytes(content)
        (folder / "state.json").write_text("{}")
        write_manifest(folder)
    return root / name


class TestAtomicWrite:
    def test_replaces_and_leaves_no_temporary(self, tmp_path: Path) -> None:
        path = tmp_path / "deep" / "summary.json"
        atomic_write_text(path, "old")
        atomic_write_text(path, "né")
        assert path.read_bytes() == "né".encode()
        assert names(path.parent) == ["summary.json"]

    def test_full_disk(self, tiny_disk: Path) -> None:
        path = tiny_disk / "summary.json"
        atomic_write_bytes(path, b"old")
        with pytest.raises(
            RunError, match=r"disk full: cannot write .*/summary\.json: 1000000 bytes wanted, \d+ bytes"
        ):
            atomic_write_bytes(path, bytes(1_000_000))
        assert path.read_bytes() == b"old"
        assert names(tiny_disk) == ["summary.json"]

    def test_disk_full_reported_by_fsync_only(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(descriptor: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        atomic_write_bytes(tmp_path / "a", b"old")
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(RunError, match="5 bytes wanted"):
            atomic_write_bytes(tmp_path / "a", b"12345")
        assert names(tmp_path) == ["a"] and (tmp_path / "a").read_bytes() == b"old"

    def test_other_errors_are_one_line(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(RunError) as raised:
            atomic_write_text(tmp_path / "file" / "below", "x")
        assert "file/below" in str(raised.value) and "\n" not in str(raised.value)

    def test_reader_never_sees_half(self, tmp_path: Path) -> None:
        """A writer is killed at a random moment, many times; what is there is always one of its whole contents."""
        path = tmp_path / "f"
        code = (
            "import sys\nfrom megatron_tlt.platform.files import atomic_write_bytes\n"
            "for i in range(10**9): atomic_write_bytes(sys.argv[1], bytes([i % 256]) * 200_000, durable=False)"
        )
        for delay in (0.0, 0.013, 0.037):
            writer = subprocess.Popen([sys.executable, "-c", code, str(path)])
            path.unlink(missing_ok=True)
            deadline = time.monotonic() + 20
            while not path.exists() and time.monotonic() < deadline:
                time.sleep(0.005)
            time.sleep(delay)
            writer.send_signal(signal.SIGKILL)
            writer.wait()
            data = path.read_bytes()
            assert len(data) == 200_000 and data == data[:1] * 200_000
        clean_leftovers(tmp_path)
        assert names(tmp_path) == ["f"]


class TestAtomicFolder:
    def test_appears_whole(self, tmp_path: Path) -> None:
        with atomic_folder(tmp_path / "step-000001") as folder:
            (folder / "a").write_text("a")
            assert not (tmp_path / "step-000001").exists()
            assert folder.name.startswith(f".step-000001.tmp-{Owner.current().text}-")
        assert names(tmp_path) == ["step-000001"]
        assert (tmp_path / "step-000001" / "a").read_text() == "a"

    @pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt()])
    def test_failure_leaves_the_old_one(self, tmp_path: Path, error: BaseException) -> None:
        save(tmp_path, "c", b"old")
        with pytest.raises(type(error)), atomic_folder(tmp_path / "c") as folder:
            (folder / "a").write_text("half")
            raise error
        assert names(tmp_path) == ["c"]
        assert verify_manifest(tmp_path / "c") == []

    def test_replaces(self, tmp_path: Path) -> None:
        save(tmp_path, "c", b"old")
        save(tmp_path, "c", b"new")
        assert names(tmp_path) == ["c"]
        assert (tmp_path / "c" / "shard" / "0.bin").read_bytes() == b"new"

    def test_full_disk_while_writing(self, tiny_disk: Path) -> None:
        old = save(tiny_disk, "step-1")
        with pytest.raises(RunError, match=r"disk full: cannot write .*/step-2: \d+ bytes wanted"):
            save(tiny_disk, "step-2", bytes(1_000_000))
        assert names(tiny_disk) == ["step-1"]
        assert verify_manifest(old) == []

    def test_full_disk_in_the_manifest_names_the_folder(self, tiny_disk: Path) -> None:
        with (
            pytest.raises(RunError, match=r"cannot write .*/step-2: ") as raised,
            atomic_folder(tiny_disk / "step-2") as f,
        ):
            atomic_write_bytes(f / "manifest.json", bytes(1_000_000))
        assert ".tmp-" not in str(raised.value)
        assert names(tiny_disk) == []

    def test_full_disk_that_torch_reports(self, tiny_disk: Path) -> None:
        torch = pytest.importorskip("torch")
        with pytest.raises(RunError, match="disk full"), atomic_folder(tiny_disk / "step-2") as folder:
            torch.save(torch.zeros(100_000), folder / "weights.pt")
        assert names(tiny_disk) == []

    def test_too_large_before_anything_is_written(self, tmp_path: Path) -> None:
        entered = False
        with pytest.raises(RunError, match=f"{2**62} bytes wanted"), atomic_folder(tmp_path / "c", 2**62):
            entered = True
        assert not entered and names(tmp_path) == []


class TestManifest:
    def test_whole(self, tmp_path: Path) -> None:
        folder = save(tmp_path, "c")
        manifest = json.loads((folder / "manifest.json").read_text())
        assert sorted(manifest["files"]) == ["shard/0.bin", "state.json"]
        assert manifest["files"]["shard/0.bin"]["bytes"] == 7
        assert verify_manifest(folder) == []

    @settings(max_examples=15)
    @given(content=st.binary(min_size=1, max_size=200), data=st.data())
    def test_any_damage_is_seen(
        self, tmp_path_factory: pytest.TempPathFactory, content: bytes, data: st.DataObject
    ) -> None:
        folder = save(tmp_path_factory.mktemp("m"), "c", content)
        file = folder / "shard" / "0.bin"
        kind = data.draw(st.sampled_from(["truncate", "flip", "remove", "grow"]))
        position = data.draw(st.integers(0, len(content) - 1))
        if kind == "truncate":
            file.write_bytes(content[:position])
        elif kind == "flip":
            file.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
            assert verify_manifest(folder, hashes=False) == []
        elif kind == "remove":
            file.unlink()
        else:
            file.write_bytes(content + b"\0")
        (problem,) = verify_manifest(folder)
        assert "0.bin" in problem

    @pytest.mark.parametrize("text", ["", "{", "[]", '{"files": {"a": 1}, "format": 1}', '{"files": {}, "format": 0}'])
    def test_damaged_manifest(self, tmp_path: Path, text: str) -> None:
        folder = save(tmp_path, "c")
        (folder / "manifest.json").write_text(text)
        (problem,) = verify_manifest(folder)
        assert "manifest.json" in problem

    def test_missing_and_outside(self, tmp_path: Path) -> None:
        assert "no such folder" in verify_manifest(tmp_path / "nothing")[0]
        folder = save(tmp_path, "c")
        entry = {"bytes": 0, "sha256": ""}
        (folder / "manifest.json").write_text(json.dumps({"format": 1, "files": {"../../x": entry}}))
        assert "outside" in verify_manifest(folder)[0]
        (folder / "manifest.json").unlink()
        assert "missing" in verify_manifest(folder)[0]


class TestLatest:
    def test_pointer_is_followed(self, tmp_path: Path) -> None:
        assert find_latest_whole(tmp_path / "none") == (None, [])
        assert find_latest_whole(tmp_path) == (None, [])
        for step in (1, 2, 10):
            save(tmp_path, f"step-{step}")
        set_latest(tmp_path, "step-2")
        assert find_latest_whole(tmp_path) == (tmp_path / "step-2", [])
        set_latest(tmp_path, "step-10")
        assert find_latest_whole(tmp_path) == (tmp_path / "step-10", [])

    def test_falls_back_to_the_newest_whole(self, tmp_path: Path) -> None:
        for step in (9, 10, 11):
            save(tmp_path, f"step-{step}")
        set_latest(tmp_path, "step-11")
        (tmp_path / "step-11" / "shard" / "0.bin").write_bytes(b"torn")
        found, warnings = find_latest_whole(tmp_path)
        assert found == tmp_path / "step-10"
        assert len(warnings) == 1 and "step-11" in warnings[0] and "4 bytes" in warnings[0]

    def test_no_pointer_or_a_dangling_one(self, tmp_path: Path) -> None:
        for step in (9, 10):
            save(tmp_path, f"step-{step}")
        assert find_latest_whole(tmp_path) == (tmp_path / "step-10", [])
        atomic_write_text(tmp_path / "latest", "step-12\n")
        found, warnings = find_latest_whole(tmp_path)
        assert found == tmp_path / "step-10" and "step-12" in warnings[0]

    def test_none_is_whole(self, tmp_path: Path) -> None:
        for step in (1, 2):
            (save(tmp_path, f"step-{step}") / "state.json").unlink()
        found, warnings = find_latest_whole(tmp_path)
        assert found is None and len(warnings) == 2

    @pytest.mark.parametrize("removed", ["step-1", "step-1/state.json"])
    def test_a_checkpoint_that_a_live_run_removes_is_no_damage(self, tmp_path: Path, removed: str) -> None:
        """The run publishes the next one while this one is hashed; its removal is over, or has only begun."""
        save(tmp_path, "step-1")
        set_latest(tmp_path, "step-1")

        def hash_beside_a_live_run(files: Sequence[Path]) -> list[FileSum]:
            if not (tmp_path / "step-2").exists():
                save(tmp_path, "step-2")
                set_latest(tmp_path, "step-2")
                path = tmp_path / removed
                path.unlink() if path.is_file() else shutil.rmtree(path)
            return sha256_sums(files)

        assert find_latest_whole(tmp_path, sums=hash_beside_a_live_run) == (tmp_path / "step-2", [])

    def test_it_looks_again_three_times(self, tmp_path: Path) -> None:
        save(tmp_path, "step-0")
        looked_at: list[str] = []

        def hash_what_is_removed(files: Sequence[Path]) -> list[FileSum]:
            newest = files[0].relative_to(tmp_path).parts[0]
            looked_at.append(newest)
            if newest != "step-0":
                shutil.rmtree(tmp_path / newest)
                save(tmp_path, f"step-{len(looked_at) + 1}")
            return sha256_sums(files)

        save(tmp_path, "step-1")
        assert find_latest_whole(tmp_path, sums=hash_what_is_removed) == (tmp_path / "step-0", [])
        assert looked_at == ["step-1", "step-2", "step-3", "step-4", "step-0"]

    @pytest.mark.parametrize("name", ["", "step-2", "../c", "latest"])
    def test_only_folders_of_the_root(self, tmp_path: Path, name: str) -> None:
        save(tmp_path, "c")
        set_latest(tmp_path, "c")
        with pytest.raises(RunError, match="latest"):
            set_latest(tmp_path, name)
        assert find_latest_whole(tmp_path)[0] == tmp_path / "c"

"""Manifests: what is never whole, and other releases' formats."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_tlt.checkpoint import manifest
from megatron_tlt.checkpoint.files import atomic_folder, find_latest_whole
from megatron_tlt.checkpoint.manifest import (
    MANIFEST,
    PENDING,
    NewerFormatError,
    read_manifest,
    rewriting,
    verify_manifest,
    write_manifest,
)
from megatron_tlt.checkpoint.weights import verify_weights
from megatron_tlt.errors import RunError
from megatron_tlt.platform.owner import Owner

# As the release of format 1 wrote it, by hand: later releases read it as well.
FORMAT_1 = """{
 "files": {
  "actor/__0_0.distcp": {
   "bytes": 7,
   "sha256": "9b2ad0e1c0c36b1bd2a4a3ef1ea0a2fc6b0d0d1b8a4b2a8fdf2a1a3f1d1c0b0a"
  }
 },
 "format": 1
}
"""


def folder_with(tmp_path: Path, name: str = "step_1", content: bytes = b"weights") -> Path:
    with atomic_folder(tmp_path / name) as folder:
        (folder / "actor").mkdir()
        (folder / "actor" / "__0_0.distcp").write_bytes(content)
        write_manifest(folder)
    return tmp_path / name


def set_format(folder: Path, version: int) -> None:
    found = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(found | {"format": version}))


def test_nothing_in_it_is_never_whole(tmp_path: Path) -> None:
    folder = tmp_path / "step_1"
    folder.mkdir()
    (folder / MANIFEST).write_text('{"format": 1, "files": {}}')
    assert verify_manifest(folder) == [f"{folder / MANIFEST}: names no file"]
    assert find_latest_whole(tmp_path)[0] is None


def test_a_folder_whose_files_were_removed_is_not_published(tmp_path: Path) -> None:
    """As when another process took the temporary folder for a leftover."""
    with pytest.raises(RunError, match="no file for a"), atomic_folder(tmp_path / "step_1") as folder:
        (folder / "weights").write_bytes(b"x")
        shutil.rmtree(folder)
        write_manifest(folder)
    assert list(tmp_path.iterdir()) == []


def test_a_newer_release_is_named_as_the_reason(tmp_path: Path) -> None:
    folder_with(tmp_path, "step_1")
    newer = folder_with(tmp_path, "step_2")
    set_format(newer, manifest.FORMAT + 1)
    with pytest.raises(NewerFormatError, match=rf"step_2/manifest\.json: format {manifest.FORMAT + 1}.*newer release"):
        find_latest_whole(tmp_path)


def test_older_formats_are_migrated_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_with(tmp_path)
    monkeypatch.setattr(manifest, "FORMAT", 3)
    entries = json.loads((folder / MANIFEST).read_text())["files"]
    (folder / MANIFEST).write_text(json.dumps({"format": 1, "listed": [[n, e] for n, e in entries.items()]}))
    monkeypatch.setitem(manifest.MIGRATIONS, 1, lambda old: {"names": dict(old["listed"])})
    monkeypatch.setitem(manifest.MIGRATIONS, 2, lambda old: {"files": old["names"]})
    assert verify_manifest(folder) == []
    monkeypatch.delitem(manifest.MIGRATIONS, 1)
    assert "unreadable" in verify_manifest(folder)[0]


def test_every_format_up_to_the_current_one_has_a_migration() -> None:
    assert sorted(manifest.MIGRATIONS) == list(range(1, manifest.FORMAT))


def test_format_1_is_read(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text(FORMAT_1)
    assert read_manifest(tmp_path)["actor/__0_0.distcp"].size == 7


def test_unreadable_file_is_a_problem_and_no_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_with(tmp_path)

    def broken(*_: object) -> object:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("hashlib.file_digest", broken)
    assert verify_manifest(folder) == [f"{folder / 'actor/__0_0.distcp'}: cannot be read: Input/output error"]
    with pytest.raises(RunError, match="Input/output error"):
        write_manifest(folder)


def test_selected_files_must_be_named(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    (folder / "notes.txt").write_text("x")
    assert verify_manifest(folder, select=lambda name: name.startswith("actor/")) == []
    (folder / "actor" / "__1_0.distcp").write_bytes(b"other weights")
    (problem,) = verify_manifest(folder, select=lambda name: name.startswith("actor/"))
    assert "__1_0.distcp: not in manifest.json" in problem
    assert verify_manifest(folder) == []


def drafter_of(folder: Path) -> Path:
    folder.mkdir()
    for name in ("config.json", "training.safetensors", "notes.txt"):
        (folder / name).write_text(f"old {name}")
    write_manifest(folder)
    return folder


def rewrite(folder: Path) -> None:
    with rewriting(folder) as staged:
        for name in ("config.json", "training.safetensors"):
            (staged / name).write_text(f"newer {name}")


def test_a_rewrite_that_fails_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    folder = drafter_of(tmp_path / "drafter")
    with pytest.raises(ValueError, match="failed"), rewriting(folder) as staged:
        (staged / "training.safetensors").write_text("half")
        raise ValueError("failed")
    assert verify_manifest(folder) == [] and sorted(path.name for path in folder.iterdir()) == [
        *("config.json", "manifest.json", "notes.txt", "training.safetensors")
    ]
    (folder / "training.safetensors").write_text("old traininG.safetensors")
    with pytest.raises(RunError, match="SHA-256 differs"):
        verify_weights(folder)
    (folder / "notes.txt").write_text("OLD notes.txt")
    rewrite(folder)
    verify_weights(folder)
    assert verify_manifest(folder) == [f"{folder / 'notes.txt'}: SHA-256 differs from the manifest's"], (
        "a file that is not rewritten keeps its sum"
    )


def test_a_rewrite_on_a_full_disk_leaves_nothing_behind(tiny_disk: Path) -> None:
    folder = drafter_of(tiny_disk / "drafter")
    (folder / MANIFEST).write_text((folder / MANIFEST).read_text() + " " * 100_000)  # its successor needs more room
    before = sorted(folder.iterdir())
    with pytest.raises(RunError, match="disk full"), rewriting(folder) as staged:
        (staged / "training.safetensors").write_bytes(bytes(40_000))
        for number in range(1000):
            (staged / f"{number:05d}-{'x' * 200}").touch()  # the manifest names them
    assert sorted(folder.iterdir()) == before and verify_manifest(folder) == []


def test_a_rewrite_removes_what_a_dead_writer_left(tmp_path: Path) -> None:
    folder = drafter_of(tmp_path / "drafter")
    dead = replace(Owner.current(), pid=(1 << 22) - 1)
    left = folder / f".{PENDING}.tmp-{dead.text}-0"
    left.touch()
    rewrite(folder)
    assert not left.exists()


class Killed(BaseException):
    """Nothing runs after it."""


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("renames", range(5))
def test_a_rewrite_that_is_killed_leaves_weights_that_are_verified(
    first: bool, renames: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before each of its renames: the new manifest's, two files', the manifest's own."""
    folder = tmp_path / "drafter"
    if not first:
        drafter_of(folder)
    done, replace = 0, os.replace

    def replace_or_die(source: Path, target: Path) -> None:
        nonlocal done
        if done == renames:
            raise Killed
        done += 1
        replace(source, target)

    with monkeypatch.context() as patched, contextlib.suppress(Killed):
        patched.setattr("os.replace", replace_or_die)
        rewrite(folder)
    assert done == min(renames, 4)
    weights = folder / "training.safetensors"
    if weights.is_file():
        verify_weights(folder)
        content = weights.read_text()
        weights.write_text(content.replace("training", "TRAINING"))
        with pytest.raises(RunError, match="the weights are damaged"):
            verify_weights(folder)
        weights.write_text(content)
    rewrite(folder)
    assert verify_manifest(folder) == [] and weights.read_text() == "newer training.safetensors"
    assert not [path for path in folder.iterdir() if "rewriting" in path.name]

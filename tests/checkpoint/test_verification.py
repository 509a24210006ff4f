"""Published checkpoints are verified beside the process that writes, replaces and removes them."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from megatron_tlt.checkpoint.files import atomic_folder, set_latest
from megatron_tlt.checkpoint.manifest import FileSum, sha256_sums, write_manifest
from megatron_tlt.checkpoint.verification import BackgroundVerification, damage


def write(folder: Path, content: str = "weights", *, latest: bool = True) -> Path:
    with atomic_folder(folder) as temporary:
        (temporary / "actor").mkdir()
        for name in ("actor/one.distcp", "actor/two.distcp", "state.json"):
            (temporary / name).write_text(f"{content} of {name}")
        write_manifest(temporary)
    if latest:
        set_latest(folder.parent, folder.name)
    return folder


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def no_wait(seconds: float) -> None:
    """Nobody removes files."""


def result(verification: BackgroundVerification) -> list[str]:
    until = time.monotonic() + 30
    while (found := verification.poll()) is None:
        assert time.monotonic() < until, "nothing was verified"
        time.sleep(0.01)
    return found


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (None, None),
        (flip_a_bit, "SHA-256 differs"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "bytes, the manifest says"),
        (Path.unlink, "missing"),
    ],
)
def test_damage_names_the_file(tmp_path: Path, harm: Callable[[Path], None] | None, said: str | None) -> None:
    folder = write(tmp_path / "step_000001")
    if harm is not None:
        harm(folder / "actor" / "two.distcp")
    verification = BackgroundVerification()
    verification.start(folder)
    found = result(verification)
    assert verification.poll() is None, "a result is returned once"
    verification.close()
    assert [("actor/two.distcp" in line, said in line) for line in found] == ([] if said is None else [(True, True)])


def test_a_checkpoint_that_is_removed_meanwhile_is_not_damaged(tmp_path: Path) -> None:
    old = write(tmp_path / "step_000001")
    write(tmp_path / "step_000002")

    def remove_some(files: Sequence[Path]) -> list[FileSum]:
        files[0].unlink()
        return sha256_sums(files)

    seconds: list[float] = []

    def remove_rest(wait: float) -> None:
        seconds.append(wait)
        if len(seconds) == 1:
            (old / "state.json").unlink()
        else:
            shutil.rmtree(old)

    assert damage(old, sums=remove_some, wait=remove_rest) is None
    assert len(seconds) == 2, "as long as files go, it waits"
    assert damage(old, sums=sha256_sums, wait=no_wait) is None


def test_an_older_one_that_stays_incomplete_is_damaged(tmp_path: Path) -> None:
    old = write(tmp_path / "step_000001")
    write(tmp_path / "step_000002")
    (old / "state.json").unlink()
    (line,) = damage(old, sums=sha256_sums, wait=no_wait) or []
    assert line == f"{old / 'state.json'}: missing"


def test_the_latest_is_never_pruned_so_nobody_waits(tmp_path: Path) -> None:
    folder = write(tmp_path / "step_000001")
    (folder / "state.json").unlink()

    def wait(seconds: float) -> None:
        raise AssertionError("it waits")

    assert damage(folder, sums=sha256_sums, wait=wait) == [f"{folder / 'state.json'}: missing"]


def test_one_that_is_saved_again_meanwhile_is_verified_again(tmp_path: Path) -> None:
    folder = write(tmp_path / "step_000001", "first")
    passes: list[int] = []

    def replace_first(files: Sequence[Path]) -> list[FileSum]:
        passes.append(len(files))
        if len(passes) == 1:
            write(folder, "other")  # of the same size, so that only the sums differ
        return sha256_sums(files)

    assert damage(folder, sums=replace_first, wait=no_wait) == []
    assert passes == [3, 3]


def test_the_newest_that_waits_is_verified_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, verified = threading.Event(), []

    def slow(folder: Path, **_: object) -> list[str]:
        verified.append(folder.name)
        go.wait(30)
        return ["damaged"] if folder.name == "step_1" else []

    monkeypatch.setattr("megatron_tlt.checkpoint.verification.damage", slow)
    verification = BackgroundVerification()
    verification.start(tmp_path / "step_1")
    while not verified:
        time.sleep(0.01)
    for step in (2, 3):
        verification.start(tmp_path / f"step_{step}")
    assert verification.poll() is None
    go.set()
    verification.close(wait=True)
    assert verified == ["step_1", "step_3"]
    assert verification.poll() == ["damaged"], "good news of step 3 do not hide it"


def test_an_unexpected_error_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr("megatron_tlt.checkpoint.verification.damage", broken)
    verification = BackgroundVerification()
    verification.start(tmp_path / "step_1")
    assert result(verification) == [f"{tmp_path / 'step_1'}: cannot be verified: MemoryError: no memory"]
    verification.close()


def test_closing_does_not_wait_for_a_large_checkpoint(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "step_000001") as folder:
        (folder / "state.json").write_text("{}")
        write_manifest(folder)
    folder = tmp_path / "step_000001"
    manifest = (folder / "manifest.json").read_text()
    os.truncate(folder / "state.json", 1 << 42)  # no blocks; hashing it takes hours
    (folder / "manifest.json").write_text(manifest.replace('"bytes": 2', f'"bytes": {1 << 42}'))
    verification = BackgroundVerification()
    verification.start(folder)
    time.sleep(0.2)
    verification.close()
    assert verification.poll() is None


def test_its_thread_alone_has_low_priority(tmp_path: Path) -> None:
    verification = BackgroundVerification()
    verification.start(write(tmp_path / "step_000001"))
    result(verification)
    (thread,) = [each for each in threading.enumerate() if each.name == "verify-checkpoints"]
    assert os.getpriority(os.PRIO_PROCESS, thread.native_id or 0) > os.getpriority(os.PRIO_PROCESS, 0)
    assert thread.daemon
    verification.close()

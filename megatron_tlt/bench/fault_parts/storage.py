"""Faults of processes, files, disks and clocks, for every store."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from megatron_tlt.bench.fault_parts.disks import mounted
from megatron_tlt.bench.fault_parts.stores import STORES, MemoryStore, RowStore, Store
from megatron_tlt.bench.fault_parts.trial import Broken, Part, Trial, check, wait_until
from megatron_tlt.errors import RunError

_LIMIT_S = 30.0
_DAY_S = 86400.0
MakeStore = Callable[[Path], Store]


class _Writer:
    """A forked process that writes ``versions`` and says in a pipe which of them are written."""

    def __init__(self, make: MakeStore, folder: Path, first: int, count: int = 10_000) -> None:
        self._told, writing = os.pipe()
        os.set_blocking(self._told, False)
        self.written = first - 1
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.close(self._told)
                store = make(folder)
                for version in range(first, first + count):
                    store.write(version)
                    os.write(writing, version.to_bytes(8, "little"))
                status = 0
            finally:
                os._exit(status)
        os.close(writing)

    def look(self) -> int:
        """The newest version that the writer has reported, or the one before its first."""
        while True:
            try:
                said = os.read(self._told, 8)
            except BlockingIOError:
                return self.written
            if not said:
                return self.written
            self.written = int.from_bytes(said, "little")

    def end(self, number: signal.Signals | None = None) -> int:
        """Waits for the end, after a signal if one is given; returns the exit status."""
        if number is not None:
            os.kill(self.pid, number)
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.look()
        os.close(self._told)
        return status


def _write(make: MakeStore, folder: Path, first: int, count: int) -> float:
    """Writes versions in a process of their own; returns seconds per version."""
    began = time.perf_counter()
    check(_Writer(make, folder, first, count).end() == 0, "a writer failed without a fault")
    return (time.perf_counter() - began) / count


def _goes_on(make: MakeStore, folder: Path, found: int | None) -> None:
    """A new writer's versions are found, and it removes what the last one left half written."""
    after = (found or 0) + 1
    _write(make, folder, after, 2)
    check(make(folder).read() == after + 1, f"found {make(folder).read()} after version {after + 1} was written")
    # a snapshot's folder is removed as a whole when its launch ends
    hidden = [entry.name for entry in folder.rglob(".*")] if make is not MemoryStore else []
    check(not hidden, f"left behind: {hidden}")


def _killed(make: MakeStore, rng: random.Random, folder: Path) -> None:
    seconds = _write(make, folder, 1, 2)
    writer = _Writer(make, folder, 3)
    time.sleep(rng.uniform(0.0, 4 * seconds))
    check(writer.end(signal.SIGKILL) == -signal.SIGKILL, "a writer failed without a fault")
    found = make(folder).read()
    check(found is not None and found >= writer.written, f"found {found} after {writer.written} was written")
    check((found or 0) <= writer.written + 1, f"found {found}, which nobody has written")
    _goes_on(make, folder, found)


def _stopped(make: MakeStore, rng: random.Random, folder: Path) -> None:
    seconds = _write(make, folder, 1, 2)
    writer = _Writer(make, folder, 3)
    try:
        time.sleep(rng.uniform(0.0, 4 * seconds))
        os.kill(writer.pid, signal.SIGSTOP)
        time.sleep(0.01)
        found = make(folder).read()
        written = writer.look()
        check(found is not None and written <= found <= written + 1, f"found {found} after {written} was written")
        os.kill(writer.pid, signal.SIGCONT)
        wait_until(lambda: writer.look() >= written + 2, _LIMIT_S, "a version after the stop")
    finally:
        writer.end(signal.SIGKILL)
    _goes_on(make, folder, make(folder).read())


def truncate(file: Path, rng: random.Random) -> None:
    os.truncate(file, rng.randrange(max(1, file.stat().st_size)))


def flip(file: Path, rng: random.Random) -> None:
    content = bytearray(file.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)


def _zeros(file: Path, rng: random.Random) -> None:
    """As after a power cut: the file has its length, and from some page on nothing was written."""
    size = file.stat().st_size
    begin = rng.randrange(max(1, size))
    os.truncate(file, begin)
    os.truncate(file, size)


def delete(file: Path, rng: random.Random) -> None:
    file.unlink()


def _damaged(damage: Callable[[Path, random.Random], None], make: MakeStore, rng: random.Random, folder: Path) -> None:
    count = rng.randint(2, 4)
    _write(make, folder, 1, count)
    store = make(folder)
    file = rng.choice(store.files(count))
    damage(file, rng)
    said = f"after damage to {file.relative_to(folder)}"
    try:
        found = store.read()
    except RunError:
        found = None
    if isinstance(store, RowStore):
        check((found or 0) <= count, f"found row {found} of {count} {said}")
    elif store.copies > 1:
        check(found in (count - 1, count), f"found {found} of versions up to {count} {said}")
    else:
        check(found in (None, count), f"found {found} of version {count} {said}")
    # what was damaged is written over in time
    _write(make, folder, count + 1 if not isinstance(store, RowStore) else (found or 0) + 1, 2)
    last = count + 2 if not isinstance(store, RowStore) else (found or 0) + 2
    check(make(folder).read() == last, f"found {make(folder).read()} after version {last} was written, {said}")


def _remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True, capture_output=True)


def _bytes_below(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def _full(make: MakeStore, rng: random.Random, folder: Path) -> None:
    probe = folder / "probe"
    probe.mkdir()
    _write(make, probe, 1, 1)
    one = _bytes_below(probe)
    with mounted(folder / "disk", int(one * rng.uniform(1.1, 3.0)) + (64 << 10)) as disk:
        own, others = disk / "own", disk / "others"
        own.mkdir()
        store, written = make(own), 0
        try:
            for version in range(1, 400):
                if make is not RowStore and version > 3:
                    with suppress(OSError), others.open("ab") as file:  # what other users of the disk write
                        file.write(bytes(one // 4))
                store.write(version)
                written = version
        except RunError:
            pass
        else:  # slots in memory keep what they have
            check(make is MemoryStore, "the disk was not full")
        check(store.read() == (written or None), f"found {store.read()} after {written} was written")
        others.unlink(missing_ok=True)
        _remount(disk, f"size={64 * one + (8 << 20)}")
        _goes_on(make, own, written)


def _read_only(make: MakeStore, rng: random.Random, folder: Path) -> None:
    with mounted(folder / "disk", 256 << 20) as disk:
        count = rng.randint(1, 3)
        _write(make, disk, 1, count)
        _remount(disk, "ro")
        store = make(disk)
        try:
            store.write(count + 1)
        except RunError:
            pass
        else:
            raise Broken("a version was written to a disk that cannot be written to")
        check(store.read() == count, f"found {store.read()} after {count} was written")
        _remount(disk, "rw")
        _goes_on(make, disk, count)


def _clock(make: MakeStore, rng: random.Random, folder: Path) -> None:
    """The node's clock jumps between versions, as if it had been set; dates of files are what it showed."""
    for version in range(1, rng.randint(3, 6)):
        _write(make, folder, version, 1)
        shown = time.time() + rng.uniform(-10 * _DAY_S, 10 * _DAY_S)
        for path in folder.rglob("*"):
            os.utime(path, (shown, shown))
        check(make(folder).read() == version, f"found {make(folder).read()} after version {version} was written")
    _goes_on(make, folder, make(folder).read())


_FAULTS: dict[str, Callable[[MakeStore, random.Random, Path], None]] = {
    "SIGKILL": _killed,
    "SIGSTOP": _stopped,
    "truncated file": partial(_damaged, truncate),
    "flipped bit": partial(_damaged, flip),
    "lost pages": partial(_damaged, _zeros),
    "deleted file": partial(_damaged, delete),
    "full disk": _full,
    "read-only disk": _read_only,
    "clock jump": _clock,
}


def trial(fault: str, make: MakeStore) -> Trial:
    """The trial of a fault on what ``make`` makes."""
    return lambda rng, folder: _FAULTS[fault](make, rng, folder)


def storage_parts() -> dict[str, Part]:
    """Every store with the faults that it is to survive."""
    parts: dict[str, Part] = {}
    for store in STORES:
        faults = [fault for fault in _FAULTS if (store is not RowStore or fault != "flipped bit")]
        parts[store.name] = {fault: trial(fault, store) for fault in faults}
    return parts

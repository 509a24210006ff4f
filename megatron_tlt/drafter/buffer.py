"""The online data buffer of one rank: responses of this step and, drawn by length, of earlier ones.

TLT (2511.16665): the responses that are finished while others still decode are the short ones, so a drafter that
learned from them alone would be wrong about long ones; long responses of the step before are mixed in (one-step-off
sampling).
"""

from __future__ import annotations

import hashlib
import logging
import random
from dataclasses import dataclass, field
from pathlib import Path

from megatron_tlt.config.drafter import DrafterBufferConfig
from megatron_tlt.drafter.entry import (
    DamagedEntry,
    Description,
    Entry,
    describe,
    read_description,
    read_entry,
    to_bytes,
)
from megatron_tlt.errors import ConfigError
from megatron_tlt.platform.files import atomic_write_bytes

logger = logging.getLogger(__name__)
_SUFFIX = ".entry"


@dataclass
class BufferCounts:
    """What went in and out: ``found + added`` is always ``stored + replaced`` and all that was dropped.

    ``found`` were in the folder when it was opened. Dropped are: ``too_short`` to draft anything, ``too_large`` for the
    buffer by themselves, for want of ``capacity``, ``expired`` by age, ``rewound`` as a resumed run samples them again,
    ``damaged`` files, files with hidden states of ``other_width`` than asked for.
    """

    found: int = 0
    added: int = 0
    replaced: int = 0
    dropped: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(
            ("too_short", "too_large", "capacity", "expired", "rewound", "damaged", "other_width"), 0
        )
    )


@dataclass
class _Stored:
    description: Description
    entry: Entry | None
    on_disk: bool
    serial: int


class DataBuffer:
    """Entries by key, within bounds on memory and files.

    New entries are in memory; the ones that came first go to files when memory is full. :meth:`flush` writes all the
    others too: what it (or an eviction from memory) has written is there again in the next process, however this one
    ends. Files are written whole or not at all, and read only if every byte is as it was written. With ``disk_bytes`` 0
    nothing is written. One process uses a folder at a time; no method is safe against another thread.

    Args:
        folder: this rank's own; made if need be. What is in it is taken over, the oldest dropped beyond the bounds.
        config: the bounds.
        seed: of :meth:`sample`.
        width: of all entries' hidden states; files of another drafter's are dropped. None takes any.
    """

    def __init__(self, folder: Path, config: DrafterBufferConfig, seed: int, width: int | None = None) -> None:
        self._folder, self._config, self._seed, self._width = folder, config, seed, width
        self._stored: dict[str, _Stored] = {}
        self._serial = 0
        self._newest_step = 0
        self._bytes = 0
        self._memory_bytes = 0
        self.counts = BufferCounts()
        if config.disk_bytes:
            self._open()

    def _open(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for leftover in self._folder.glob(f".*{_SUFFIX}.tmp-*"):
            leftover.unlink()
        for path in sorted(self._folder.glob(f"*{_SUFFIX}")):
            self.counts.found += 1
            try:
                description = read_description(path)
                if path != self._path(description.key):
                    raise DamagedEntry(f"it is named for another key than {description.key!r}")
            except DamagedEntry as damage:
                self._damaged(path, damage)
                continue
            self._keep(_Stored(description, None, True, 0))
        self._drop_other_widths()
        self._expire()
        self._make_room()

    def _drop_other_widths(self) -> None:
        others = [item for item in self._stored.values() if self._width not in (None, item.description.width)]
        for stored in others:
            self._drop(stored, "other_width")
        if others:
            widths = sorted({item.description.width for item in others})
            logger.warning(
                "%s: %d responses dropped from the drafter's data: hidden states of width %s; the drafter asks for %d",
                self._folder,
                len(others),
                widths,
                self._width,
            )

    def _damaged(self, path: Path, damage: DamagedEntry) -> None:
        logger.warning("%s: dropped from the drafter's data: %s", path, damage)
        self.counts.dropped["damaged"] += 1
        path.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self._folder / (hashlib.blake2b(key.encode(), digest_size=16).hexdigest() + _SUFFIX)

    @property
    def capacity(self) -> int:
        """Bytes that all entries together may take."""
        return self._config.disk_bytes or self._config.memory_bytes

    @property
    def nbytes(self) -> int:
        """Bytes that all entries together take, wherever they are."""
        return self._bytes

    @property
    def memory_nbytes(self) -> int:
        """Bytes of the entries in memory."""
        return self._memory_bytes

    @property
    def descriptions(self) -> list[Description]:
        """Of all entries, by key."""
        return [self._stored[key].description for key in sorted(self._stored)]

    def __len__(self) -> int:
        return len(self._stored)

    def __contains__(self, key: str) -> bool:
        return key in self._stored

    def add(self, entry: Entry) -> bool:
        """Takes an entry in; False where it was dropped at once. Others are dropped to make room for it.

        A step newer than any so far ages the others. An entry with a key that is there already replaces it. Both hold
        for one that is dropped, too.

        Raises:
            ConfigError: its hidden states have another width than the buffer's.
            RunError: the disk is full (of other things) while entries go to files.
        """
        if self._width not in (None, entry.width):
            raise ConfigError(
                f"drafter entry {entry.key!r} has hidden states of width {entry.width}; the buffer holds {self._width}"
            )
        self.counts.added += 1
        self._newest_step = max(self._newest_step, entry.step)
        old = self._stored.get(entry.key)
        if old is not None:
            self.counts.replaced += 1
            self._forget(old)
        if entry.num_drafted < 1 or entry.nbytes > self.capacity:
            self.counts.dropped["too_short" if entry.num_drafted < 1 else "too_large"] += 1
            if old is not None and old.on_disk:
                self._path(entry.key).unlink(missing_ok=True)
            self._expire()
            return False
        self._serial += 1
        # The old one's file stays until the new one takes its place: what was acknowledged is never missing.
        replaces_file = old is not None and old.on_disk
        stored = _Stored(describe(entry), entry, replaces_file, self._serial)
        self._keep(stored)
        self._expire()
        self._make_room()
        if replaces_file and entry.key in self._stored:
            stored.on_disk = False
            self._write(stored)
        self._spill()
        return entry.key in self._stored

    def _keep(self, stored: _Stored) -> None:
        self._stored[stored.description.key] = stored
        self._bytes += stored.description.nbytes
        self._memory_bytes += stored.description.nbytes if stored.entry is not None else 0
        self._newest_step = max(self._newest_step, stored.description.step)

    def _forget(self, stored: _Stored) -> None:
        """Takes an entry off the books; its file stays."""
        del self._stored[stored.description.key]
        self._bytes -= stored.description.nbytes
        self._memory_bytes -= stored.description.nbytes if stored.entry is not None else 0

    def _drop(self, stored: _Stored, reason: str) -> None:
        self._forget(stored)
        self.counts.dropped[reason] += 1
        if self._config.disk_bytes:
            self._path(stored.description.key).unlink(missing_ok=True)

    def _expire(self) -> None:
        oldest = self._newest_step - self._config.max_age
        for stored in [item for item in self._stored.values() if item.description.step < oldest]:
            self._drop(stored, "expired")

    def _make_room(self) -> None:
        """Drops the shortest entries until the rest fits: of earlier steps as long as these take more than half."""

        def shortest_last(items: list[_Stored]) -> list[_Stored]:
            return sorted(items, key=lambda item: (-item.description.length, item.description.key))

        if self._bytes <= self.capacity:
            return
        everything = self._stored.values()
        earlier = shortest_last([item for item in everything if item.description.step < self._newest_step])
        current = shortest_last([item for item in everything if item.description.step == self._newest_step])
        earlier_bytes = sum(item.description.nbytes for item in earlier)
        while self._bytes > self.capacity:
            if earlier and (2 * earlier_bytes > self.capacity or not current):
                victim = earlier.pop()
                earlier_bytes -= victim.description.nbytes
            else:
                victim = current.pop()
            self._drop(victim, "capacity")

    def _spill(self) -> None:
        """Moves the entries that came first out of memory until the rest fits there."""
        if self._memory_bytes <= self._config.memory_bytes:
            return
        for stored in sorted(self._stored.values(), key=lambda item: item.serial):
            if stored.entry is not None:
                self._write(stored)
                stored.entry = None
                self._memory_bytes -= stored.description.nbytes
            if self._memory_bytes <= self._config.memory_bytes:
                return

    def _write(self, stored: _Stored) -> None:
        if stored.on_disk:
            return
        assert stored.entry is not None
        # No flush to the platter: a killed process loses nothing by it, and a torn file is found by its sum.
        atomic_write_bytes(self._path(stored.description.key), to_bytes(stored.entry), durable=False)
        stored.on_disk = True

    def flush(self) -> list[str]:
        """Writes what is only in memory; the keys of all entries that now survive this process (none without a disk).

        Raises:
            RunError: the disk is full (of other things); what was written before stays.
        """
        if not self._config.disk_bytes:
            return []
        for stored in self._stored.values():
            self._write(stored)
        return sorted(self._stored)

    def rewind(self, step: int) -> None:
        """Drops the entries of steps behind ``step``: a run that resumes there samples them again."""
        for stored in [item for item in self._stored.values() if item.description.step > step]:
            self._drop(stored, "rewound")
        self._newest_step = min(self._newest_step, step)

    def get(self, key: str) -> Entry | None:
        """The entry, read from its file if need be; None where it is not there, or its file was damaged."""
        stored = self._stored.get(key)
        if stored is None or stored.entry is not None:
            return stored.entry if stored else None
        try:
            entry = read_entry(self._path(key))
            if entry.key != key:
                raise DamagedEntry(f"it holds {entry.key!r}")
            return entry
        except DamagedEntry as damage:
            self._forget(stored)
            self._damaged(self._path(key), damage)
            return None

    def sample(self, count: int, step: int, draw: int) -> list[Entry]:
        """Up to ``count`` different entries: of ``step`` evenly, of earlier steps with weight proportional to length.

        ``earlier_fraction`` of them come from earlier steps; where one side has too few, the other fills up. The same
        seed, step, draw and content give the same entries, wherever these are kept.
        """
        digest = hashlib.blake2b(f"{self._seed}/{step}/{draw}".encode(), digest_size=8).digest()
        rng = random.Random(int.from_bytes(digest, "big"))
        descriptions = [item for item in self.descriptions if item.step <= step]
        # Efraimidis and Spirakis (2006): the largest of u ** (1 / weight) are a weighted sample without replacement.
        drawn = {item.key: rng.random() ** (1.0 if item.step == step else 1.0 / item.length) for item in descriptions}
        ranked = sorted(descriptions, key=lambda item: (-drawn[item.key], item.key))
        current = [item.key for item in ranked if item.step == step]
        earlier = [item.key for item in ranked if item.step < step]
        wanted = min(len(earlier), max(round(count * self._config.earlier_fraction), count - len(current)))
        entries = self._read(earlier, wanted)
        return entries + self._read(current, count - len(entries))

    def _read(self, keys: list[str], count: int) -> list[Entry]:
        entries: list[Entry] = []
        for key in keys:
            if len(entries) >= count:
                break
            if (entry := self.get(key)) is not None:
                entries.append(entry)
        return entries

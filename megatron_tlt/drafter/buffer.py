"""The online data buffer of one rank: responses of this RL step and, sampled by length, of earlier steps.

TLT (2511.16665): responses that finish while others still decode are short, so a drafter trained on them alone is poor
on long ones. Long responses of the previous step are therefore mixed in (one-step-off sampling). Older responses come
from an older policy, so they are sampled only if newer ones are too few.
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from megatron_tlt.checkpoint.leftovers import clean_leftovers
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
    """Counts of entries: ``found + added`` equals ``stored + replaced`` plus all dropped.

    ``found``: in the folder when it was opened. Reasons for dropping: ``too_short`` to draft from, ``too_large`` for
    the buffer, lack of ``capacity``, ``expired`` by age, ``rewound`` because a resumed run samples them again,
    ``damaged`` file, hidden states of ``other_width``.
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
    """Entries by key, bounded in memory and on disk.

    New entries are in memory; when memory is full, the oldest move to files. :meth:`flush` writes all others. Entries
    written by a flush or an eviction survive any end of the process. Writes are atomic, and reads verify a checksum.
    With ``disk_bytes`` 0 nothing is written. One process at a time uses a folder; methods are not thread-safe.

    A checkpoint refers to entries by key (:meth:`snapshot`); a resumed run gets exactly these entries back
    (:meth:`restore`). Files of dropped entries stay while one of the newest two checkpoints refers to them, so all
    files take at most three times ``disk_bytes``.

    Args:
        folder: this rank's own; created if missing. All entries in it are loaded, even beyond the bounds, which apply
            after :meth:`restore` or the first :meth:`add`.
        config: the bounds.
        seed: of :meth:`sample`.
        width: of all hidden states; files with another width are dropped. None accepts any width.
    """

    def __init__(self, folder: Path, config: DrafterBufferConfig, seed: int, width: int | None = None) -> None:
        self._folder, self._config, self._seed, self._width = folder, config, seed, width
        self._stored: dict[str, _Stored] = {}
        self._serial = 0
        self._newest_step = 0
        self._bytes = 0
        self._memory_bytes = 0
        # keys of the newest published checkpoint and of the one being written
        self._checkpointed: deque[frozenset[str]] = deque(maxlen=2)
        self._kept_files: set[str] = set()  # keys of dropped entries that a checkpoint refers to
        self.counts = BufferCounts()
        if config.disk_bytes:
            self._open()

    def _open(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        clean_leftovers(self._folder)
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
        """Maximum total bytes of all entries."""
        return self._config.disk_bytes or self._config.memory_bytes

    @property
    def nbytes(self) -> int:
        """Total bytes of all entries, in memory and on disk."""
        return self._bytes

    @property
    def memory_nbytes(self) -> int:
        """Bytes of the entries in memory."""
        return self._memory_bytes

    @property
    def descriptions(self) -> list[Description]:
        """Descriptions of all entries, ordered by key."""
        return [self._stored[key].description for key in sorted(self._stored)]

    def __len__(self) -> int:
        return len(self._stored)

    @property
    def earlier_fraction(self) -> float:
        """Share of a batch that comes from earlier RL steps."""
        return self._config.earlier_fraction

    def __contains__(self, key: str) -> bool:
        return key in self._stored

    def add(self, entry: Entry) -> bool:
        """Add an entry, dropping others if it needs room; returns False if the entry itself was dropped.

        An entry of a newer step than any so far ages the others. An entry with an existing key replaces the old one.
        Both also hold if the new entry is dropped.

        Raises:
            ConfigError: its hidden states have another width than the buffer's.
            RunError: the disk is full (of other files) while entries are written.
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
        # the old file stays until the new one replaces it, so that an acknowledged entry is never missing
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
        """Remove an entry from the books; its file stays."""
        del self._stored[stored.description.key]
        self._bytes -= stored.description.nbytes
        self._memory_bytes -= stored.description.nbytes if stored.entry is not None else 0

    def _drop(self, stored: _Stored, reason: str) -> None:
        self._forget(stored)
        self.counts.dropped[reason] += 1
        if stored.on_disk and self._is_checkpointed(stored.description.key):
            self._kept_files.add(stored.description.key)
        elif self._config.disk_bytes:
            self._path(stored.description.key).unlink(missing_ok=True)

    def _is_checkpointed(self, key: str) -> bool:
        return any(key in keys for keys in self._checkpointed)

    def _expire(self) -> None:
        oldest = self._newest_step - self._config.max_age
        for stored in [item for item in self._stored.values() if item.description.step < oldest]:
            self._drop(stored, "expired")

    def _make_room(self) -> None:
        """Drop entries until the rest fits; those of earlier steps first while they take more than half.

        The oldest step's entries are dropped first, within a step the shortest.
        """

        def shortest_last(items: list[_Stored]) -> list[_Stored]:
            return sorted(items, key=lambda i: (-i.description.step, -i.description.length, i.description.key))

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
        """Move the oldest entries from memory to files until the rest fits in memory."""
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
        # no fsync: killing the process loses nothing, and the checksum detects a torn file
        atomic_write_bytes(self._path(stored.description.key), to_bytes(stored.entry), durable=False)
        stored.on_disk = True
        self._kept_files.discard(stored.description.key)

    def flush(self) -> list[str]:
        """Write entries that are only in memory; returns the keys that now survive this process (none without a disk).

        Raises:
            RunError: the disk is full (of other files); entries written before stay.
        """
        if not self._config.disk_bytes:
            return []
        for stored in self._stored.values():
            self._write(stored)
        return sorted(self._stored)

    def snapshot(self) -> list[str]:
        """Flush for a checkpoint; returns the keys that the checkpoint refers to.

        A save begins after the previous one is published, so the files of both stay, even of entries dropped later.
        Files that only older checkpoints refer to are removed. Saving the same step again replaces its checkpoint, so
        the previous one still counts.
        """
        keys = self.flush()
        if not self._checkpointed or not self._checkpointed[-1].issuperset(keys):
            self._checkpointed.append(frozenset(keys))
        for key in [key for key in self._kept_files if not self._is_checkpointed(key)]:
            self._kept_files.remove(key)
            self._path(key).unlink(missing_ok=True)
        return keys

    def restore(self, step: int, keys: Collection[str] | None = None) -> int:
        """Drop entries that the buffer did not hold after ``step``; a resumed run samples later steps again.

        Args:
            step: the newest step to keep, -1 for none.
            keys: the result of :meth:`snapshot`; all other entries are dropped. None keeps what the bounds allow.

        Returns:
            The number of missing ``keys``; 0 without a disk, as none are expected then.
        """
        items = list(self._stored.values())
        past = {item.description.key for item in items if item.description.step <= step}
        known = frozenset(past if keys is None else keys)
        missing = len(known - past) if self._config.disk_bytes else 0
        self._checkpointed.append(known)
        for stored in items:
            if stored.description.key not in past & known:
                self._drop(stored, "rewound")
        self._newest_step = max(0, step)
        if keys is None:
            self._expire()
        self._make_room()
        return missing

    def get(self, key: str) -> Entry | None:
        """The entry, read from its file if necessary; None if it is missing or its file is damaged."""
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
        """Sample up to ``count`` different entries of ``step`` and earlier steps.

        Entries of ``step`` are sampled uniformly. Earlier entries are sampled with weight proportional to length, the
        newest step first; older ones only fill up. ``earlier_fraction`` of the batch comes from earlier steps, and all
        of it if ``step`` has no entries yet, as during its rollout. If one group has too few, the other fills up.

        The same seed, step, draw and content give the same entries, in memory or on disk.
        """
        digest = hashlib.blake2b(f"{self._seed}/{step}/{draw}".encode(), digest_size=8).digest()
        rng = random.Random(int.from_bytes(digest, "big"))
        descriptions = [item for item in self.descriptions if item.step <= step]
        # Efraimidis and Spirakis (2006): the largest u ** (1 / weight) are a weighted sample without replacement
        drawn = {item.key: rng.random() ** (1.0 if item.step == step else 1.0 / item.length) for item in descriptions}
        ranked = sorted(descriptions, key=lambda item: (-item.step, -drawn[item.key], item.key))
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

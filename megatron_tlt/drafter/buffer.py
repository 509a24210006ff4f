"""The online data buffer of one rank: responses of this step and, drawn by length, of earlier ones.

TLT (2511.16665): the responses that are finished while others still decode are the short ones, so a drafter that
learned from them alone would be wrong about long ones; long responses of the step before are mixed in (one-step-off
sampling). Older responses come from an older policy, so they are drawn only where newer ones are too few.
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from megatron_tlt.checkpoint.files import clean_leftovers
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

    A checkpoint refers to entries by key (:meth:`snapshot`), and a resumed run gets exactly these back
    (:meth:`restore`). Files of dropped entries stay while the newest two checkpoints refer to them: all files together
    take at most three times ``disk_bytes``.

    Args:
        folder: this rank's own; made if need be. All that is in it is taken over, even beyond the bounds, which hold
            after :meth:`restore` or the first :meth:`add`.
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
        # keys of the newest published checkpoint and of the one in flight
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

    @property
    def earlier_fraction(self) -> float:
        """Of a batch: how much of it is of earlier steps."""
        return self._config.earlier_fraction

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
        """Drops entries until the rest fits, those of earlier steps as long as these take more than half.

        Those of the oldest step go first, of one step the shortest.
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
        self._kept_files.discard(stored.description.key)

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

    def snapshot(self) -> list[str]:
        """Flushes for a checkpoint, and returns the keys that the checkpoint refers to.

        A save begins after the one before is published, so the files of both stay, even of entries that are dropped
        later. Files that only earlier checkpoints refer to are removed. To save the same step again replaces its
        checkpoint, so the one before it counts as before.
        """
        keys = self.flush()
        if not self._checkpointed or not self._checkpointed[-1].issuperset(keys):
            self._checkpointed.append(frozenset(keys))
        for key in [key for key in self._kept_files if not self._is_checkpointed(key)]:
            self._kept_files.remove(key)
            self._path(key).unlink(missing_ok=True)
        return keys

    def restore(self, step: int, keys: Collection[str] | None = None) -> int:
        """Drops what the buffer did not hold after ``step``; a resumed run samples later steps again.

        Args:
            step: the newest step that is kept, -1 for none.
            keys: what :meth:`snapshot` returned; all others are dropped. None keeps what the bounds allow.

        Returns:
            How many of ``keys`` are missing; 0 without a disk, as none is expected then.
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
        """Up to ``count`` different entries of ``step`` and earlier ones.

        Those of ``step`` are drawn evenly. Earlier ones are drawn with weight proportional to length, from the newest
        of their steps first; older ones only fill up. ``earlier_fraction`` of the batch comes from earlier steps, all
        of it where ``step`` has none yet, as during its rollout. Where one side has too few, the other fills up.

        The same seed, step, draw and content give the same entries, wherever these are kept.
        """
        digest = hashlib.blake2b(f"{self._seed}/{step}/{draw}".encode(), digest_size=8).digest()
        rng = random.Random(int.from_bytes(digest, "big"))
        descriptions = [item for item in self.descriptions if item.step <= step]
        # Efraimidis and Spirakis (2006): the largest of u ** (1 / weight) are a weighted sample without replacement.
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

"""The data buffer: bounds, counts, durability, damaged files, sampling."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import zlib
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_tlt.config.drafter import ENTRY_OVERHEAD_BYTES, DrafterBufferConfig, DrafterConfig
from megatron_tlt.drafter.buffer import DataBuffer
from megatron_tlt.drafter.entry import DamagedEntry, Entry, read_entry, to_bytes
from megatron_tlt.errors import ConfigError, RunError
from megatron_tlt.platform.files import temporary_sibling
from megatron_tlt.platform.owner import Owner
from tests.helpers.launch import REPOSITORY

from .workers.buffer_writer import numbered

WORKER = Path(__file__).parent / "workers" / "buffer_writer.py"
WIDTH = 64
PREFIX = struct.Struct("<8sII")  # magic, CRC-32 of the rest, bytes of the description


def entry(key: str, length: int, step: int = 0, prompt_length: int = 1) -> Entry:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{key}/{length}".encode()))
    tokens = torch.randint(0, 99, (length,), generator=generator, dtype=torch.int32)
    hidden = torch.randn(length, WIDTH, generator=generator).bfloat16()
    return Entry(key, step, tokens, prompt_length, hidden, length / 7)


def same(a: Entry, b: Entry) -> bool:
    tensors, others = a.tensors(), b.tensors()
    facts = [(x.key, x.step, x.prompt_length, x.reward) for x in (a, b)]
    return (
        facts[0] == facts[1]
        and tensors.keys() == others.keys()
        and all(t.dtype == others[n].dtype and torch.equal(t, others[n]) for n, t in tensors.items())
    )


def size(length: int) -> int:
    return entry("x", length).nbytes


def disk_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir()) if folder.is_dir() else 0


def balanced(buffer: DataBuffer) -> bool:
    counts = buffer.counts
    gone = counts.replaced + sum(counts.dropped.values())
    return counts.found + counts.added == len(buffer) + gone


operation = st.one_of(
    st.tuples(st.just("add"), st.integers(0, 12), st.integers(2, 60), st.integers(0, 3)),
    st.tuples(st.just("flush")),
    st.tuples(st.just("reopen")),
    st.tuples(st.just("rewind"), st.integers(0, 5)),
    st.tuples(st.just("sample"), st.integers(1, 8), st.integers(0, 9)),
)


@settings(max_examples=40)
@example(operations=[("add", 0, 3, 0), ("add", 0, 2, 0)], memory=6000, disk=0, max_age=0)  # too short for a draft
@example(operations=[("add", 0, 3, 0), ("flush",), ("add", 0, 2, 3), ("reopen",)], memory=6000, disk=9000, max_age=0)
@example(  # a checkpoint keeps the file of an entry that has expired since
    operations=[("add", 1, 3, 0), ("flush",), ("rewind", 0), ("add", 0, 2, 3), ("reopen",)],
    memory=6000,
    disk=6000,
    max_age=0,
)
@example(  # so does one that a resumed run was given
    operations=[("add", 0, 3, 0), ("rewind", 0), ("add", 1, 4, 0), ("reopen",), ("add", 0, 2, 3), ("reopen",)],
    memory=6000,
    disk=6000,
    max_age=0,
)
@given(
    operations=st.lists(operation, max_size=40),
    memory=st.integers(6000, 40000),
    disk=st.one_of(st.just(0), st.integers(6000, 60000)),
    max_age=st.integers(0, 3),
)
def test_bounds_hold_counts_add_up_and_samples_were_stored(
    tmp_path_factory: pytest.TempPathFactory,
    operations: list[tuple[object, ...]],
    memory: int,
    disk: int,
    max_age: int,
) -> None:
    folder = tmp_path_factory.mktemp("buffer")
    config = DrafterBufferConfig(memory_bytes=memory, disk_bytes=disk, max_age=max_age)
    buffer = DataBuffer(folder, config, seed=1)
    latest: dict[str, Entry] = {}
    referred: set[str] = set()
    step = 0
    for name, *values in operations:
        if name == "add":
            number, length, ahead = (int(str(value)) for value in values)
            step += ahead // 3
            new = entry(str(number), length, step)
            latest[new.key] = new
            assert buffer.add(new) == (new.key in buffer)
        elif name == "flush":
            assert buffer.flush() == ([item.key for item in buffer.descriptions] if disk else [])
        elif name == "reopen" and disk:
            acknowledged = buffer.flush()
            buffer = DataBuffer(folder, config, seed=1)
            found = {item.key for item in buffer.descriptions}
            assert found >= {*acknowledged} and found - {*acknowledged} <= referred, "files that a checkpoint refers to"
            if referred:
                assert buffer.restore(step, acknowledged) == 0
                referred |= {*acknowledged}
            assert [item.key for item in buffer.descriptions] == acknowledged
        elif name == "rewind":
            step = min(step, int(str(values[0])))
            referred |= {item.key for item in buffer.descriptions}
            assert buffer.restore(step) == 0
        elif name == "sample":
            count, draw = (int(str(value)) for value in values)
            drawn = buffer.sample(count, step, draw)
            assert len(drawn) == min(count, len(buffer)) == len({item.key for item in drawn})
            assert all(same(item, latest[item.key]) for item in drawn)
        assert balanced(buffer)
        assert buffer.nbytes <= buffer.capacity and buffer.memory_nbytes <= memory
        assert disk_bytes(folder) <= (3 * disk if referred else disk)
        assert all(step - max_age <= item.step <= step for item in buffer.descriptions)


def test_a_kill_loses_no_acknowledged_entry_and_no_torn_file_is_loaded(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, str(WORKER), str(tmp_path)], stdout=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    acknowledged = 0
    while acknowledged < 60:
        acknowledged = int(process.stdout.readline().split()[1])
    process.send_signal(signal.SIGKILL)
    rest = process.stdout.read().splitlines()
    acknowledged = max([acknowledged, *(int(line.split()[1]) for line in rest if line.count(b" ") == 1)])
    assert process.wait() == -signal.SIGKILL

    dead = replace(Owner.current(), started=Owner.current().started - 1)
    (tmp_path / f".{'0' * 32}.entry.tmp-{dead.text}-1").write_bytes(b"half of an entry")
    live = temporary_sibling(tmp_path / f"{'1' * 32}.entry")
    live.write_bytes(b"another process is writing it")
    buffer = DataBuffer(tmp_path, DrafterBufferConfig(memory_bytes=1 << 20, disk_bytes=1 << 30), seed=0)
    assert list(tmp_path.glob(".*")) == [live]
    for i in range(acknowledged):
        found = buffer.get(f"0/{i}")
        assert found is not None and same(found, numbered(i))
    assert all(same(numbered(int(d.key[2:])), buffer.get(d.key) or numbered(0)) for d in buffer.descriptions)
    assert buffer.counts.dropped["damaged"] == 0


def test_every_kind_of_file_damage_is_detected(tmp_path: Path) -> None:
    whole = to_bytes(entry("a", 20))
    file = tmp_path / "e"
    for at in [*range(0, 40), *range(40, len(whole), 97), len(whole) - 1]:
        file.write_bytes(whole[:at])
        with pytest.raises(DamagedEntry):
            read_entry(file)
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with pytest.raises(DamagedEntry):
            read_entry(file)
    file.write_bytes(whole)
    assert same(read_entry(file), entry("a", 20))
    assert len(whole) <= entry("a", 20).nbytes


def test_files_of_another_drafter_are_dropped_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A folder from before the drafter's kind changed; one of its files predates the stored width."""
    before = DataBuffer(tmp_path, DrafterBufferConfig(), seed=0)
    for number in range(4):
        before.add(entry(str(number), 10 + number))
    before.flush()
    first = sorted(tmp_path.iterdir())[0]
    first.write_bytes(without_width(first.read_bytes()))
    kept = DataBuffer(tmp_path, DrafterBufferConfig(), seed=0, width=WIDTH)
    assert (len(kept), kept.counts.dropped["other_width"], kept.counts.dropped["damaged"]) == (3, 0, 1)
    assert balanced(kept)
    with pytest.raises(ConfigError, match=f"'4' has hidden states of width {WIDTH}; the buffer holds {4 * WIDTH}"):
        DataBuffer(tmp_path / "other", DrafterBufferConfig(), seed=0, width=4 * WIDTH).add(entry("4", 10))
    caplog.clear()
    other = DataBuffer(tmp_path, DrafterBufferConfig(), seed=0, width=4 * WIDTH)
    assert (other.counts.found, len(other), other.nbytes) == (3, 0, 0) and balanced(other)
    assert other.counts.dropped["other_width"] == 3 and not list(tmp_path.glob("*.entry"))
    assert f"3 responses dropped from the drafter's data: hidden states of width [{WIDTH}]" in caplog.text


def without_width(data: bytes) -> bytes:
    """An entry's file whose description lacks the width, with a correct checksum."""
    magic, _, length = PREFIX.unpack_from(data)
    fields = json.loads(data[PREFIX.size : PREFIX.size + length])
    del fields["width"]
    description = json.dumps(fields).encode()
    body = description + data[PREFIX.size + length :]
    return PREFIX.pack(magic, zlib.crc32(body), len(description)) + body


def test_a_damaged_entry_is_dropped_counted_and_replaced_in_the_sample(tmp_path: Path) -> None:
    config = DrafterBufferConfig(memory_bytes=1, disk_bytes=1 << 20)
    buffer = DataBuffer(tmp_path, config, seed=0)
    for i in range(6):
        assert buffer.add(entry(str(i), 20))
    assert buffer.memory_nbytes == 0
    files = sorted(tmp_path.iterdir())
    assert len(files) == 6
    for file, cut in zip(files[:2], (-1, -700), strict=True):
        file.write_bytes(file.read_bytes()[:cut])
    assert len(buffer.sample(4, 0, 0)) == 4
    assert len(buffer.sample(6, 0, 1)) == 4
    assert buffer.counts.dropped["damaged"] == 2 and len(buffer) == 4 and balanced(buffer)
    files[2].write_bytes(b"")
    again = DataBuffer(tmp_path, config, seed=0)
    assert (again.counts.found, len(again), again.counts.dropped["damaged"]) == (4, 3, 1) and balanced(again)


def test_replacing_an_acknowledged_entry_leaves_one_of_the_two(tmp_path: Path) -> None:
    config = DrafterBufferConfig(memory_bytes=1 << 20, disk_bytes=1 << 20)
    buffer = DataBuffer(tmp_path, config, seed=0)
    buffer.add(entry("a", 20))
    buffer.flush()
    buffer.add(entry("a", 30))  # not flushed
    found = DataBuffer(tmp_path, config, seed=0).get("a")
    assert found is not None and same(found, entry("a", 30))


def test_the_shortest_entries_of_earlier_steps_are_dropped_first(tmp_path: Path) -> None:
    room = size(60) + size(50) + size(20) + size(10) + size(12)
    buffer = DataBuffer(tmp_path, DrafterBufferConfig(memory_bytes=room, disk_bytes=0), seed=0)
    for length in (10, 60, 20, 50):
        buffer.add(entry(f"0/{length}", length, step=0))
    for length in (11, 12, 13, 14, 15):
        buffer.add(entry(f"1/{length}", length, step=1))
    kept = {item.key for item in buffer.descriptions}
    assert {"0/60", "1/15"} <= kept and "0/10" not in kept
    assert buffer.counts.dropped["capacity"] == 9 - len(kept)
    assert not list(tmp_path.iterdir())  # without a disk nothing is written


def test_sampling_is_deterministic_one_step_off_and_by_length(tmp_path: Path) -> None:
    config = DrafterBufferConfig(memory_bytes=1 << 20, disk_bytes=1 << 20, earlier_fraction=0.25)
    buffer = DataBuffer(tmp_path, config, seed=3)
    lengths = {f"0/{i}": 10 * (1 + i) for i in range(6)}
    for key, length in lengths.items():
        buffer.add(entry(key, length, step=0))
    for i in range(8):
        buffer.add(entry(f"1/{i}", 5, step=1))
    drawn: Counter[str] = Counter()
    draws = 3000
    for draw in range(draws):
        keys = [item.key for item in buffer.sample(4, 1, draw)]
        assert sorted(key[0] for key in keys) == ["0", "1", "1", "1"]
        drawn.update(keys)
    for key, length in lengths.items():
        assert drawn[key] / draws == pytest.approx(length / sum(lengths.values()), abs=0.03)
    assert all(drawn[f"1/{i}"] / draws == pytest.approx(3 / 8, abs=0.03) for i in range(8))

    buffer.flush()
    again = DataBuffer(tmp_path, config, seed=3)  # loaded from files, in another order
    for draw in range(20):
        assert [e.key for e in again.sample(4, 1, draw)] == [e.key for e in buffer.sample(4, 1, draw)]
    other = DataBuffer(tmp_path, config, seed=4)
    assert any([e.key for e in other.sample(4, 1, d)] != [e.key for e in buffer.sample(4, 1, d)] for d in range(5))
    assert len(buffer.sample(13, 1, 0)) == 13  # either group fills up for the other
    assert {e.step for e in buffer.sample(6, 0, 0)} == {0}


def test_the_newest_earlier_step_is_sampled_first_and_older_ones_fill_up(tmp_path: Path) -> None:
    buffer = DataBuffer(tmp_path, DrafterBufferConfig(memory_bytes=1 << 20, disk_bytes=0, max_age=3), seed=3)
    lengths = {f"2/{i}": 10 * (1 + i) for i in range(6)}
    for step in range(2):
        for i in range(6):
            buffer.add(entry(f"{step}/{i}", 300, step=step))
    for key, length in lengths.items():
        buffer.add(entry(key, length, step=2))
    drawn: Counter[str] = Counter()
    draws = 3000
    for draw in range(draws):  # as during the rollout of step 3, which has no entries yet
        (one,) = buffer.sample(1, 3, draw)
        drawn[one.key] += 1
    for key, length in lengths.items():
        assert drawn[key] / draws == pytest.approx(length / sum(lengths.values()), abs=0.03)
    for draw in range(20):
        assert Counter(item.step for item in buffer.sample(6, 3, draw)) == {2: 6}
        assert Counter(item.step for item in buffer.sample(14, 3, draw)) == {2: 6, 1: 6, 0: 2}
        # as after the update of step 2: half of it uniformly from step 2, half from step 1
        assert Counter(item.step for item in buffer.sample(6, 2, draw)) == {2: 3, 1: 3}
        assert Counter(item.step for item in buffer.sample(16, 2, draw)) == {2: 6, 1: 6, 0: 4}


def test_entries_of_the_newest_checkpoint_stay_on_disk_and_are_restored(tmp_path: Path) -> None:
    """A run saves after steps 1 and 3 and is killed in step 5, when the bounds allow only steps 4 and 5."""
    config = DrafterBufferConfig(memory_bytes=1, disk_bytes=1 << 20, max_age=1)
    buffer = DataBuffer(tmp_path, config, seed=0)
    saved: list[list[str]] = []
    for step in range(6):
        for i in range(3):
            buffer.add(entry(f"{step}/{i}", 20 + i, step))
        if step % 2 and step < 5:
            saved.append(buffer.snapshot())
        assert {item.step for item in buffer.descriptions} == set(range(max(0, step - 1), step + 1))
        assert balanced(buffer)
    # step 1 belongs to the second-newest checkpoint, kept in case the newest save was still in flight
    assert len(list(tmp_path.glob("*.entry"))) == 5 * 3 + 3
    again = DataBuffer(tmp_path, config, seed=0)
    assert again.restore(3, saved[-1]) == 0
    assert (
        [item.key for item in again.descriptions] == saved[-1] == [f"{step}/{i}" for step in (2, 3) for i in range(3)]
    )
    assert all(
        same(again.get(f"{s}/{i}") or entry("x", 9), entry(f"{s}/{i}", 20 + i, s)) for s in (2, 3) for i in range(3)
    )
    assert len(list(tmp_path.glob("*.entry"))) == 6 and balanced(again)
    for step in (4, 5):
        for i in range(3):
            again.add(entry(f"{step}/{i}", 20 + i, step))
        again.snapshot()
    # the checkpoints after steps 4 and 5 refer to steps 3 to 5
    assert len(list(tmp_path.glob("*.entry"))) == 9
    again.snapshot()  # an evaluation saves the newest step again
    assert len(list(tmp_path.glob("*.entry"))) == 9
    before = DataBuffer(tmp_path, config, seed=0)
    assert before.restore(4, [f"{step}/{i}" for step in (3, 4) for i in range(3)]) == 0
    assert again.restore(5, ["5/0", "6/0"]) == 1
    assert DataBuffer(tmp_path, DrafterBufferConfig(disk_bytes=0), seed=0).restore(5, ["5/0"]) == 0


def test_files_for_checkpoints_are_bounded(tmp_path: Path) -> None:
    room = 4 * size(20)
    buffer = DataBuffer(tmp_path, DrafterBufferConfig(memory_bytes=1, disk_bytes=room, max_age=0), seed=0)
    for step in range(6):
        for i in range(4):
            buffer.add(entry(f"{step}/{i}", 20, step))
            assert disk_bytes(tmp_path) <= 3 * room
        buffer.snapshot()
        assert disk_bytes(tmp_path) <= 2 * room
    for step in range(6, 20):  # no more checkpoints
        buffer.add(entry(f"{step}/0", 20, step))
        assert disk_bytes(tmp_path) <= 3 * room


def test_too_short_and_too_large_entries_are_counted(tmp_path: Path) -> None:
    buffer = DataBuffer(tmp_path, DrafterBufferConfig(memory_bytes=6000, disk_bytes=0), seed=0)
    assert not buffer.add(entry("short", 5, prompt_length=4))
    assert not buffer.add(entry("large", 2000))
    assert buffer.add(entry("fits", 5, prompt_length=3))
    assert buffer.counts.dropped["too_short"] == buffer.counts.dropped["too_large"] == 1 and balanced(buffer)


def test_a_full_disk_raises_and_keeps_written_entries(tiny_disk: Path) -> None:
    config = DrafterBufferConfig(memory_bytes=1, disk_bytes=1 << 20)
    buffer = DataBuffer(tiny_disk, config, seed=0)
    with pytest.raises(RunError, match="disk full"):
        for i in range(200):
            buffer.add(entry(str(i), 60))
    again = DataBuffer(tiny_disk, config, seed=0)
    assert len(again) >= 10 and again.counts.dropped["damaged"] == 0
    assert all(same(again.get(item.key) or entry("", 3), entry(item.key, 60)) for item in again.descriptions)


def test_wrong_entries_are_refused_by_name() -> None:
    good = entry("a", 6)
    with pytest.raises(ConfigError, match="hidden does not have one row for each of 6 tokens"):
        Entry("a", 0, good.token_ids, 1, good.hidden[:-1], 0.0)
    with pytest.raises(ConfigError, match="prompt_length is 7; allowed: 1 to 6"):
        Entry("a", 0, good.token_ids, 7, good.hidden, 0.0)
    with pytest.raises(ConfigError, match="reward is nan"):
        Entry("a", 0, good.token_ids, 1, good.hidden, float("nan"))
    assert (
        good.nbytes == 6 * (4 + 2 * WIDTH) + ENTRY_OVERHEAD_BYTES == DrafterConfig(kind="eagle").entry_bytes(6, WIDTH)
    )
    assert DrafterConfig(kind="eagle3").entry_bytes(6, WIDTH // 4) == good.nbytes

"""Blocks in memory come back as any part of the whole tensor; each node gets the copies that it needs."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_tlt.checkpoint.memory_slots import DATA, INDEX, Block, BlockSource, MemorySlot, SlotReader
from megatron_tlt.checkpoint.snapshot_places import SavedPart, buddies, needed_copies, newest_whole
from megatron_tlt.errors import RunError


def block(key: str, whole: torch.Tensor, rows: slice, columns: slice) -> tuple[Block, torch.Tensor]:
    part = whole[rows, columns]
    return Block(key, (rows.start, columns.start), tuple(part.shape), str(whole.dtype).removeprefix("torch.")), part


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 7), st.integers(1, 7), st.data())
def test_any_part_comes_back_from_any_cuts(rows: int, columns: int, data: st.DataObject) -> None:
    whole = torch.arange(rows * columns, dtype=torch.bfloat16).view(rows, columns)
    cut = data.draw(st.integers(0, rows))
    across = data.draw(st.integers(0, columns))
    pieces = [
        block("w", whole, top, left)
        for top in (slice(0, cut), slice(cut, rows))
        for left in (slice(0, across), slice(across, columns))
        if top.start < top.stop and left.start < left.stop
    ]
    with tempfile.TemporaryDirectory() as folder:
        readers = []
        for number in range(2):  # two ranks, and the first block on both
            slot = MemorySlot(Path(folder, str(number)))
            slot.fill(pieces[:1] if number else pieces)
            slot.complete(1, slot.checksum(), {})
            readers.append(SlotReader(slot.folder))
            readers[-1].verify()
        top = data.draw(st.integers(0, rows - 1))
        left = data.draw(st.integers(0, columns - 1))
        target = torch.empty(data.draw(st.integers(1, rows - top)), data.draw(st.integers(1, columns - left)))
        BlockSource(readers).fill(target, "w", (top, left))
        assert torch.equal(target, whole[top : top + target.shape[0], left : left + target.shape[1]].float())


def test_any_bit_that_changes_in_an_index_makes_the_slot_incomplete(tmp_path: Path) -> None:
    slot, values = MemorySlot(tmp_path), torch.ones(4, 2)
    slot.fill([block("w", values, slice(0, 4), slice(0, 2))])
    slot.complete(7, slot.checksum(), {"state": 1})
    whole = (tmp_path / INDEX).read_bytes()
    for at in range(0, 8 * len(whole), 3):
        changed = bytearray(whole)
        changed[at // 8] ^= 1 << at % 8
        (tmp_path / INDEX).write_bytes(changed)
        with pytest.raises(RunError, match="not a complete snapshot"):
            SlotReader(tmp_path)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="file/slot"):
        MemorySlot(tmp_path / "file" / "slot").fill([])


def test_pages_are_made_for_a_slot_that_was_never_used_alone(tmp_path: Path) -> None:
    values = torch.ones(4, 4)  # 64 bytes, as blocks are aligned
    slot = MemorySlot(tmp_path / "new")
    slot.reserve(values.nbytes)
    made = (slot.folder / DATA).stat()
    assert made.st_size == values.nbytes and not (slot.folder / INDEX).exists()
    slot.fill([block("w", values, slice(0, 4), slice(0, 4))])
    assert (slot.folder / DATA).stat().st_ino == made.st_ino and (slot.folder / DATA).stat().st_size == made.st_size
    slot.complete(1, slot.checksum(), {})
    MemorySlot(slot.folder).reserve(1 << 20)
    MemorySlot(tmp_path / "nothing").reserve(0)
    MemorySlot(tmp_path / "crowded").reserve(values.nbytes, room=1 << 60)
    assert not (tmp_path / "crowded" / DATA).exists()
    large = MemorySlot(tmp_path / "large")
    large.reserve(1 << 20)
    assert (large.folder / DATA).stat().st_size == 1 << 20
    large.fill([block("w", values, slice(0, 4), slice(0, 4))])
    assert (large.folder / DATA).stat().st_size == values.nbytes, "what is not needed is given back"
    for count in (1 << 17, 1 << 10, 1 << 19):  # within what was reserved, and beyond it
        more = torch.arange(count, dtype=torch.float32).view(count, 1)
        large.fill([block("w", more, slice(0, count), slice(0, 1))])
        large.complete(2, large.checksum(), {})
        assert (large.folder / DATA).stat().st_size == more.nbytes
        reader = SlotReader(large.folder)
        reader.verify()
        assert torch.equal(reader.tensor(reader.blocks[0]), more)
    SlotReader(slot.folder).verify()
    assert (slot.folder / DATA).stat().st_size == made.st_size and not (tmp_path / "nothing").exists()
    with pytest.raises(RunError, match=r"cannot be reserved.*elastic\.memory_dir"):
        MemorySlot(tmp_path / "huge").reserve(1 << 60)
    assert not (tmp_path / "huge" / DATA).exists()


def test_a_slot_is_incomplete_while_it_is_written_over(tmp_path: Path) -> None:
    slot, values = MemorySlot(tmp_path), torch.ones(4, 2)
    slot.fill([block("w", values, slice(0, 4), slice(0, 2))])
    with pytest.raises(RunError, match="not a complete snapshot"):
        SlotReader(tmp_path)
    slot.complete(7, slot.checksum(), {"state": 1})
    assert SlotReader(tmp_path).step == 7 and SlotReader(tmp_path).described == {"state": 1}
    slot.fill([block("w", values, slice(0, 1), slice(0, 2))])
    with pytest.raises(RunError, match="not a complete snapshot"):
        SlotReader(tmp_path)


def test_changed_memory_and_missing_entries_are_found(tmp_path: Path) -> None:
    slot = MemorySlot(tmp_path)
    slot.fill([block("w", torch.ones(4, 2), slice(0, 3), slice(0, 2))])
    slot.complete(1, slot.checksum(), {})
    reader = SlotReader(tmp_path)
    with pytest.raises(RunError, match=r"w: the snapshot has 6 of 8 entries"):
        BlockSource([reader]).fill(torch.empty(4, 2), "w", (0, 0))
    padded = torch.full((4, 2), 5.0)
    BlockSource([reader]).fill(padded, "w", (0, 0), partly=True)
    assert padded.tolist() == [[1, 1], [1, 1], [1, 1], [5, 5]]
    with (tmp_path / DATA).open("r+b") as file:
        file.write(b"\x01")
    with pytest.raises(RunError, match="found checksum"):
        SlotReader(tmp_path).verify()


def test_too_little_memory_is_an_error_that_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(
        RunError, match=r"blocks.bin: 0 MB cannot be reserved: No space left on device; allowed: another"
    ):
        MemorySlot(tmp_path).fill([block("w", torch.ones(4, 2), slice(0, 3), slice(0, 2))])
    assert not (tmp_path / DATA).exists()


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12))
def test_a_buddy_is_on_another_node_and_none_has_much_more_than_others(nodes: list[int]) -> None:
    found = buddies(nodes)
    if len(set(nodes)) == 1:
        assert found == list(range(len(nodes)))
        return
    assert all(nodes[rank] != nodes[other] for rank, other in enumerate(found))
    assert buddies([0, 0, 1, 1]) == [2, 3, 0, 1]


@given(st.data(), st.integers(1, 4), st.integers(1, 6))
def test_each_node_gets_what_it_needs_from_one_that_has_it(data: st.DataObject, nodes: int, world: int) -> None:
    present = {node: data.draw(st.sets(st.integers(0, world - 1))) for node in range(nodes)}
    parts = {node: [SavedPart("a", 3, "slot_0", world, one) for one in ranks] for node, ranks in present.items()}
    whole = newest_whole(parts)
    assert (whole is not None) == (set().union(*present.values()) == set(range(world)))
    if whole is None:
        return
    assert {node: set(ranks) for node, ranks in whole.present.items()} == present
    needed = {node: data.draw(st.sets(st.integers(0, world - 1))) for node in range(nodes)}
    for copy in needed_copies(present, needed):
        assert copy.saved in present[copy.source] and copy.saved not in present[copy.target]
        present[copy.target].add(copy.saved)
    assert all(present[node] >= needed[node] for node in needed)


PARTS = st.builds(
    SavedPart,
    st.sampled_from("abc"),
    st.integers(1, 2),
    st.sampled_from(["x", "y"]),
    st.integers(1, 3),
    st.integers(0, 2),
)


@given(st.dictionaries(st.integers(0, 2), st.lists(PARTS, unique=True, max_size=12), min_size=1))
def test_a_whole_snapshot_has_all_ranks_of_one_save_and_is_the_newest(found: dict[int, list[SavedPart]]) -> None:
    def of_save(part: SavedPart) -> set[int]:
        same = [one for parts in found.values() for one in parts if replace(one, rank=0) == replace(part, rank=0)]
        return {one.rank for one in same}

    every = [part for parts in found.values() for part in parts]
    whole = {(one.step, one.save, one.slot, one.world) for one in every if of_save(one) >= set(range(one.world))}
    newest = newest_whole(found)
    if newest is None:
        assert not whole
        return
    step, save, slot, world = max(whole)
    assert (newest.step, newest.slot, newest.world) == (step, slot, world)
    for node, ranks in newest.present.items():
        assert sorted(ranks) == sorted(
            one.rank for one in found[node] if (one.step, one.save, one.slot, one.world) == (step, save, slot, world)
        )

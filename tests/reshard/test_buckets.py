"""Rounds of random plans: every byte once, both ends agree, never more in flight than allowed."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_tlt.errors import ConfigError
from megatron_tlt.reshard.buckets import ALIGNMENT, aligned, local_transfers, make_rounds, staging_bytes_of
from megatron_tlt.reshard.plan import ReshardPlan, make_plan
from megatron_tlt.reshard.spans import ShardMap, Span, TensorForm
from tests.reshard.test_plan import problems

TRAILER = 32


@settings(max_examples=200)
@given(problems(), st.integers(4 * (128 + TRAILER), 5000))
def test_both_ends_of_every_bucket_agree_and_nothing_is_left_out(
    problem: tuple[dict[str, TensorForm], ShardMap, ShardMap, list[int]], staging: int
) -> None:
    plan = make_plan(*problem)
    rounds = [make_rounds(plan, rank, staging, TRAILER) for rank in range(plan.world)]
    sent: dict[tuple[int, int], list[tuple]] = {}
    received: dict[tuple[int, int], list[tuple]] = {}
    moved: Counter[tuple] = Counter()
    for rank, mine in enumerate(rounds):
        assert staging_bytes_of(mine, TRAILER) <= staging
        for one in mine:
            for buckets, found in ((one.sends, sent), (one.receives, received)):
                for peer, bucket in buckets.items():
                    assert peer == bucket.peer != rank
                    pair = (rank, peer) if buckets is one.sends else (peer, rank)
                    found.setdefault(pair, []).append(tuple(bucket.transfers))
                    end = 0
                    for place in bucket.packed.values():
                        assert place.start % ALIGNMENT == 0
                        assert place.start == end
                        end += aligned(place.stop - place.start)
                    assert end == bucket.payload_bytes
            for bucket in one.sends.values():
                for t in bucket.transfers:
                    for entry in range(t.start, t.start + t.length):
                        moved[t._replace(start=entry, length=1)] += 1
    assert sent == received
    wanted = Counter(
        t._replace(start=entry, length=1)
        for t in plan.transfers
        if not t.is_local
        for entry in range(t.start, t.start + t.length)
    )
    assert moved == wanted
    local = [t for rank in range(plan.world) for t in local_transfers(plan, rank)]
    assert sorted(local) == sorted(t for t in plan.transfers if t.is_local)


def exchange(world: int, length: int) -> ReshardPlan:
    """Every rank holds a part of each tensor and needs the whole of it; tensors belong to stages of half the ranks."""
    forms = {f"t{i}": TensorForm((length, 4), 0, 4) for i in range(8)}
    held: list[list[Span]] = [[] for _ in range(world)]
    for index, name in enumerate(forms):
        stage = index * 2 // len(forms)
        for part in range(world // 2):
            share = length // (world // 2)
            held[stage * world // 2 + part].append(Span(name, part * share, share))
    whole = tuple(Span(name, 0, length) for name in forms)
    return make_plan(forms, ShardMap("PP2", tuple(map(tuple, held))), ShardMap("TP1", (whole,) * world), [0] * world)


def test_all_senders_are_busy_in_every_round() -> None:
    plan = exchange(4, 64)
    rounds = [make_rounds(plan, rank, 4 * 1024, 0) for rank in range(4)]
    least = -(-max(plan.received_bytes(False)) // 1024)
    assert max(map(len, rounds)) <= least + 1
    for mine in rounds:
        assert all(one.sends and one.receives for one in mine[: least - 1])


def test_staging_that_holds_no_entry_is_refused_with_what_it_takes() -> None:
    forms = {"wide": TensorForm((2, 1 << 20), 0, 4)}
    plan = make_plan(
        forms, ShardMap("a", ((Span("wide", 0, 2),), ())), ShardMap("b", ((), (Span("wide", 0, 2),))), [0, 0]
    )
    with pytest.raises(
        ConfigError, match=r"reshard.staging_mb: found 8; allowed: at least 16, which one entry of wide"
    ):
        make_rounds(plan, 0, 8 << 20, TRAILER)

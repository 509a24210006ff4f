"""Plans over random layouts: every entry once, from an owner, from the nearest one, and evenly."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_tlt.errors import ConfigError, RunError
from megatron_tlt.reshard.plan import ReshardPlan, make_plan
from megatron_tlt.reshard.spans import ShardMap, Span, TensorForm


def cut(tensor: str, length: int, parts: int, part: int) -> Span:
    start = length * part // parts
    return Span(tensor, start, length * (part + 1) // parts - start)


@st.composite
def problems(draw: st.DrawFn) -> tuple[dict[str, TensorForm], ShardMap, ShardMap, list[int]]:
    """A world whose ranks hold and need shares, of other numbers of parts for each tensor, replicas included."""
    world = draw(st.integers(1, 8))
    nodes = sorted(draw(st.lists(st.integers(0, 2), min_size=world, max_size=world)))
    forms, held, needed = {}, defaultdict(list), defaultdict(list)
    for index in range(draw(st.integers(1, 4))):
        name = f"tensor{index}"
        shape = (draw(st.integers(1, 24)), draw(st.integers(1, 5)))
        form = forms[name] = TensorForm(shape, draw(st.integers(0, 1)), draw(st.sampled_from([2, 4])))
        parts = draw(st.integers(1, world))
        shift = draw(st.integers(0, world - 1))
        for rank in range(world):
            held[(rank + shift) % world].append(cut(name, form.length, parts, rank % parts))
        parts = draw(st.integers(1, world))
        for rank in draw(st.lists(st.integers(0, world - 1), max_size=2 * world)):
            needed[rank].append(cut(name, form.length, parts, rank % parts))
    sides = (
        ShardMap(f"side{i}", tuple(tuple(spans[rank]) for rank in range(world)))
        for i, spans in enumerate((held, needed))
    )
    return forms, *sides, nodes


@settings(max_examples=300)
@given(problems())
def test_every_entry_is_written_once_by_its_nearest_owner(
    problem: tuple[dict[str, TensorForm], ShardMap, ShardMap, list[int]],
) -> None:
    forms, actor, engines, nodes = problem
    plan = make_plan(forms, actor, engines, nodes)
    written: Counter[tuple[int, int, int]] = Counter()
    missing = 0
    for t in plan.transfers:
        source, target = actor.spans[t.source][t.source_slot], engines.spans[t.target][t.target_slot]
        assert t.length > 0
        for span in (source, target):
            assert span.tensor == t.tensor
            assert span.start <= t.start
            assert t.start + t.length <= span.end
        for entry in range(t.start, t.start + t.length):
            written[t.target, t.target_slot, entry] += 1
            owners = {
                rank
                for rank, spans in enumerate(actor.spans)
                if any(s.tensor == t.tensor and s.start <= entry < s.end for s in spans)
            }
            assert t.source in owners
            assert t.source == t.target or t.target not in owners
            near = {rank for rank in owners if nodes[rank] == nodes[t.target]}
            assert not near or t.source in near
            missing += (t.target not in owners) * forms[t.tensor].entry_bytes
    needs = {
        (rank, slot, entry)
        for rank, spans in enumerate(engines.spans)
        for slot, span in enumerate(spans)
        for entry in range(span.start, span.end)
    }
    assert written == Counter(needs)
    assert plan.moved_bytes == plan.lower_bound == missing
    assert sum(plan.sent_bytes(True)) + sum(plan.sent_bytes(False)) == plan.moved_bytes
    assert sum(plan.received_bytes(True)) == sum(plan.sent_bytes(True))
    assert plan == make_plan(forms, actor, engines, nodes)


def test_replicas_share_the_sending() -> None:
    forms = {f"t{i}": TensorForm((8, 4), 0, 2) for i in range(30)}
    whole = tuple(Span(name, 0, 8) for name in forms)
    plan = make_plan(forms, ShardMap("replicas", (whole,) * 3 + ((),)), ShardMap("one", ((),) * 3 + (whole,)), [0] * 4)
    assert plan.sent_bytes(False) == (640, 640, 640, 0)
    assert plan.received_bytes(False) == (0, 0, 0, 1920)


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    forms = {"a": TensorForm((4, 4), 1, 4)}
    plan = make_plan(forms, ShardMap("x", ((Span("a", 0, 4),), ())), ShardMap("y", ((), (Span("a", 1, 2),))), [0, 1])
    plan.write(tmp_path / "plan.json")
    again = ReshardPlan.read(tmp_path / "plan.json")
    assert again == plan
    assert again.received_bytes(True) == (0, 32)
    (tmp_path / "plan.json").write_text('{"forms": 1}')
    with pytest.raises(ConfigError, match=r"plan.json: not a plan"):
        ReshardPlan.read(tmp_path / "plan.json")


def test_what_nobody_holds_is_named_with_rank_and_layouts() -> None:
    forms = {"a": TensorForm((4, 4), 0, 4)}
    with pytest.raises(RunError, match=r"a, entry 2: rank 1 needs it, but no rank .* \(TP2 to engines TP1 x 2\)"):
        make_plan(
            forms, ShardMap("TP2", ((Span("a", 0, 2),), ())), ShardMap("TP1 x 2", ((), (Span("a", 0, 4),))), [0, 0]
        )
    with pytest.raises(RunError, match=r"b of rank 0 is no tensor of the model"):
        make_plan(forms, ShardMap("TP2", ((Span("b", 0, 2),),)), ShardMap("TP1", ((),)), [0])
    with pytest.raises(RunError, match=r"a of rank 0: entries 2 to 5 of its 4"):
        make_plan(forms, ShardMap("TP2", ((),)), ShardMap("TP1", ((Span("a", 2, 3),),)), [0])

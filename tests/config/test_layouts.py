"""Layouts: what fits, every reason why one does not, and the nearest that do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import log2
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_tlt.config.layouts import Layout, ModelShape, divisors, nearest, problems
from tests.config.test_loader import violations, write
from tests.helpers.launch import run_python

QWEN = ModelShape(layers=28, heads=16, kv_groups=8, head_dim=128, ffn=3072)
MOE = ModelShape(layers=48, heads=32, kv_groups=4, head_dim=128, ffn=None, experts=128, moe_ffn=768)


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    groups, experts = draw(st.integers(1, 4)), draw(st.sampled_from((0, 0, 1, 4, 6)))
    widths = st.sampled_from((4, 6, 8, 12))
    return ModelShape(
        layers=draw(st.integers(1, 12)),
        heads=groups * draw(st.integers(1, 4)),
        kv_groups=groups,
        head_dim=draw(st.sampled_from((1, 3, 8))),
        ffn=draw(st.none() | widths) if experts else draw(widths),
        experts=experts,
        moe_ffn=draw(widths) if experts else None,
        shared_ffn=draw(st.none() | widths) if experts else None,
    )


@st.composite
def layouts(draw: st.DrawFn, worlds: Sequence[int] = (1, 2, 4, 6, 8, 12, 16), uneven: bool = True) -> Layout:
    small, maybe = st.sampled_from((1, 1, 2, 3, 4)), st.none() | st.integers(1, 4)
    return Layout(
        world=draw(st.sampled_from(worlds)),
        tp=draw(small),
        pp=draw(small),
        vpp=draw(maybe),
        cp=draw(small),
        ep=draw(small),
        etp=draw(maybe),
        sp=draw(st.booleans()),
        first=draw(maybe) if uneven else None,
        last=draw(maybe) if uneven else None,
        counts_embedding=uneven and draw(st.booleans()),
        counts_loss=uneven and draw(st.booleans()),
        by_hand=draw(st.booleans()) if uneven else False,
    )


def spreads(layout: Layout, layers: int) -> bool:
    """Whether the layers make whole chunks, as many on every stage of which the config says nothing."""
    if layout.by_hand:
        return True
    stages = [n for n in (layout.first, layout.last) if n]
    others, rest = layout.pp - len(stages), layers + layout.extra - sum(stages)
    if others < 0 or (others == 0) != (rest == 0) or rest < 0 or (others and rest % others):
        return False
    stages += [rest // others] * others if others else []
    return all(n % (layout.vpp or 1) == 0 for n in stages)


def allowed(layout: Layout, shape: ModelShape) -> bool:
    """Megatron-Core's rules once more, as plainly as they can be said."""
    experts, etp = shape.experts, layout.etp or layout.tp
    return all(
        (
            layout.world % (layout.tp * layout.pp * layout.cp) == 0,
            layout.world % (etp * layout.ep * layout.pp) == 0,
            layout.vpp is None or (layout.pp > 1 and layout.vpp > 1),
            shape.heads % layout.tp == 0,
            shape.kv_groups % layout.tp == 0 or layout.tp % shape.kv_groups == 0,
            (shape.heads + 2 * shape.kv_groups) * shape.head_dim % layout.tp == 0,
            (shape.ffn or 0) % layout.tp == 0,
            (shape.shared_ffn or 0) % layout.tp == 0,
            spreads(layout, shape.layers),
            experts % layout.ep == 0 and (shape.moe_ffn or 0) % etp == 0 if experts else layout.ep == 1,
            experts or layout.etp is None,
            layout.tp > 1 or not layout.sp,
            layout.sp or not experts or layout.tp == 1,
        )
    )


@given(layouts(), shapes())
def test_a_layout_fits_exactly_when_megatron_would_take_it(layout: Layout, shape: ModelShape) -> None:
    assert (problems(layout, shape) == []) == allowed(layout, shape)


@given(layouts(), st.none() | shapes(), st.none() | st.integers(1, 16))
def test_suggestions_fit(layout: Layout, shape: ModelShape | None, sequences: int | None) -> None:
    found = nearest(layout, shape, 4, sequences)
    assert len(set(found)) == len(found) <= 4
    for one in found:
        assert one.world == layout.world and problems(one, shape) == []
        assert sequences is None or one.dp <= sequences


@given(layouts(), shapes())
def test_a_layout_that_fits_is_nearest_to_itself(layout: Layout, shape: ModelShape) -> None:
    if problems(layout, shape) == []:
        assert nearest(layout, shape, 1) == [layout]
        assert nearest(layout, shape, 1, layout.dp) == [layout]


def everything(layout: Layout, shape: ModelShape) -> list[Layout]:
    """Every layout of as many processes that could be suggested."""
    sizes = divisors(layout.world)
    follows = layout.etp is None or not shape.experts
    chunks = (None, *range(2, shape.layers + layout.extra + 1))
    every = (
        replace(layout, tp=tp, pp=pp, vpp=v, cp=cp, ep=ep, etp=etp, sp=tp > 1 and (layout.sp or shape.experts > 0))
        for tp, pp, v, cp, ep, etp in product(sizes, sizes, chunks, sizes, sizes, (None,) if follows else sizes)
    )
    return [one for one in every if allowed(one, shape)]


def distance(asked: Layout, one: Layout) -> tuple[float, ...]:
    pairs = [(asked.vpp or 1, one.vpp or 1), (asked.cp, one.cp), (asked.ep, one.ep)]
    added = sum(a == 1 < b for a, b in pairs)
    asked_dp, dp = asked.world / (asked.tp * asked.pp * asked.cp), one.world / (one.tp * one.pp * one.cp)
    pairs += [(asked.tp, one.tp), (asked.pp, one.pp), (asked_dp, dp)]
    if asked.etp is not None:
        pairs.append((asked.etp, one.etp or one.tp))
    memory = log2(one.tp * one.pp * one.ep / (asked.tp * asked.pp * asked.ep))
    return (added, round(sum(abs(log2(b / a)) for a, b in pairs), 6), round(abs(memory), 6))


@settings(max_examples=50)
@given(layouts(worlds=(2, 4, 6, 8), uneven=False), shapes(), st.integers(1, 5))
def test_no_layout_that_fits_is_nearer(layout: Layout, shape: ModelShape, count: int) -> None:
    if layout.etp is not None and not shape.experts:
        layout = replace(layout, etp=None)
    best = sorted(distance(layout, one) for one in everything(layout, shape))[:count]
    assert [distance(layout, one) for one in nearest(layout, shape, count)] == best


@pytest.mark.parametrize(
    ("layout", "shape", "expected"),
    [
        (Layout(16, tp=3, pp=2), QWEN, ["TP4xPP2xDP2", "TP2xPP2xDP4", "TP2xPP4xDP2"]),
        (Layout(16, pp=3), QWEN, ["PP4xDP4", "PP2xDP8", "TP2xPP2xDP4"]),
        (Layout(16, tp=16, pp=4), QWEN, ["TP4xPP4", "TP8xPP2", "TP16"]),
        (Layout(16, pp=2, vpp=4), QWEN, ["PP2xVP7xDP8", "PP2xVP2xDP8", "PP2xVP14xDP8"]),
        (Layout(8, sp=True), QWEN, ["DP8", "PP2xDP4", "TP2xDP4+SP"]),
        (Layout(8, ep=2, etp=1), QWEN, ["DP8", "PP2xDP4", "TP2xDP4"]),
        (Layout(1, tp=2), QWEN, ["DP1"]),
        (Layout(16, tp=4, ep=3), MOE, ["TP4xEP4xDP4+SP", "TP4xEP2xDP4+SP", "TP4xDP4+SP"]),
        (Layout(16, tp=4, ep=8, etp=5), MOE, ["TP4xEP8xETP2xDP4+SP", "TP4xEP4xETP4xDP4+SP", "TP4xEP8xETP1xDP4+SP"]),
        (Layout(16, pp=4, first=1, last=1, vpp=2), replace(QWEN, layers=22), ["PP4xDP4", "TP2xPP4xDP2", "TP4xPP4"]),
        (Layout(8, pp=2), replace(QWEN, layers=61), ["TP2xDP4", "DP8", "TP4xDP2"]),
        (Layout(8, pp=2, counts_embedding=True), replace(QWEN, layers=61), ["PP2xDP4", "TP2xDP4", "DP8"]),
    ],
)
def test_suggestions_by_example(layout: Layout, shape: ModelShape, expected: list[str]) -> None:
    assert [str(one) for one in nearest(layout, shape, 3)] == expected


def reasons(tmp_path: Path, model: dict[str, object], *overrides: str) -> list[str]:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(model))
    lines = violations(write(tmp_path, model={"path": str(folder)}), *overrides)
    return [line.removeprefix(f"{tmp_path / 'base.yaml'}: ").replace(str(folder), "model") for line in lines]


def megatron(**sizes: object) -> str:
    return "actor.megatron=" + json.dumps(sizes)


DENSE = {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "hidden_size": 2048}
DENSE |= {"intermediate_size": 3072, "max_position_embeddings": 4096}
EXPERTS = DENSE | {"num_experts": 60, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5630}
AT = "(model/config.json)"
WORLD = "processes of launcher.nnodes x launcher.nproc_per_node; allowed: 1, 2, 4, 8"
FIT = "actor.megatron: the nearest layouts that fit 8 processes: "
TP, PP, VP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
EP, ETP, SP = "expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel"
FIRST, LOSS = "num_layers_in_first_pipeline_stage", "account_for_loss_in_pipeline_split"
NOT_SP = "actor.megatron.sequence_parallel: found false; allowed: true where a model with experts is trained at " + TP


@pytest.mark.parametrize(
    ("model", "sizes", "expected"),
    [
        (
            {},
            {TP: 3},
            [
                f"actor.megatron: tensor x pipeline x context parallel = 3 x 1 x 1 = 3 does not divide the 8 {WORLD}",
                f"actor.megatron.{TP}: found 3; allowed: a divisor of the model's 16 attention heads {AT}",
                FIT + "TP4xDP2, TP2xDP4, TP2xPP2xDP2",
            ],
        ),
        (
            {"num_key_value_heads": 3, "num_attention_heads": 12, "head_dim": 128},
            {TP: 4},
            [
                f"actor.megatron.{TP}: found 4; allowed: a divisor or multiple of the 3 key-value heads {AT}",
                FIT + "PP4xDP2, PP2xDP4, DP8",
            ],
        ),
        (
            {"num_key_value_heads": 1, "num_attention_heads": 8, "head_dim": 33},
            {TP: 8},
            [
                f"actor.megatron.{TP}: found 8; allowed: a divisor of the width of the model's query, key and value "
                f"projections, 330 {AT}",
                FIT + "TP2xPP4, TP2xPP2xDP2, TP2xDP4",
            ],
        ),
        (
            {},
            {PP: 8, VP: 1},
            [
                f"actor.megatron.{VP}: found 1; allowed: null or at least 2",
                "actor.megatron: pipeline x virtual pipeline parallel = 8 x 1 = 8; allowed: a divisor of the model's "
                f"28 layers: 1, 2, 4, 7, 14, 28 {AT}",
                FIT + "TP2xPP4, PP4xDP2, TP4xPP2",
            ],
        ),
        (
            {},
            {VP: 2, SP: True, ETP: 1, EP: 2},
            [
                f"actor.megatron.{VP}: found 2; allowed: null where {PP} is 1",
                f"actor.megatron.{SP}: found true; allowed: false where {TP} is 1",
                f"actor.megatron.{EP}: found 2; allowed: 1, as the model has no experts {AT}",
                f"actor.megatron.{ETP}: found 1; allowed: null, as the model has no experts {AT}",
                FIT + "DP8, PP2xVP2xDP4, PP2xDP4",
            ],
        ),
        (
            {},
            {PP: 2, FIRST: 3, VP: 2},
            [
                f"actor.megatron: found {FIRST} 3, which leaves 25 of the model's 28 layers for 1 more stages; "
                f"allowed: the same number for each of these, and on every stage a multiple of its 2 chunks {AT}",
                FIT + "PP2xDP4, TP2xPP2xDP2, TP4xPP2",
            ],
        ),
        (
            {},
            {PP: 4, LOSS: True},
            [
                "actor.megatron: pipeline x virtual pipeline parallel = 4 x 1 = 4; allowed: a divisor of the model's "
                f"28 layers and the 1 counted with them: 1, 29 {AT}",
                FIT + "TP4xDP2, TP2xDP4, DP8",
            ],
        ),
        (
            EXPERTS,
            {TP: 4, EP: 8},
            [
                "actor.megatron: expert tensor x expert x pipeline parallel = 4 x 8 x 1 = 32 does not divide the 8 "
                + WORLD,
                f"actor.megatron.{TP}: found 4; allowed: a divisor of the model's shared_expert_intermediate_size, "
                f"5630 {AT}",
                f"actor.megatron.{EP}: found 8; allowed: a divisor of the model's 60 experts: 1, 2, 3, 4, 5, 6, 10, "
                f"12, 15, 20, 30, 60 {AT}",
                f"{NOT_SP} 4 {AT}",
                FIT + "TP2xEP4xDP4+SP, TP2xPP2xEP2xDP2+SP, TP2xEP2xDP4+SP",
            ],
        ),
        (
            EXPERTS,
            {TP: 2, EP: 4, ETP: 3, SP: True},
            [
                "actor.megatron: expert tensor x expert x pipeline parallel = 3 x 4 x 1 = 12 does not divide the 8 "
                + WORLD,
                f"actor.megatron.{ETP}: found 3; allowed: a divisor of the width of the model's experts, 1408 {AT}",
                FIT + "TP2xEP4xETP2xDP4+SP, TP2xEP2xETP4xDP4+SP, TP2xEP4xETP1xDP4+SP",
            ],
        ),
        # Mixtral's config: experts as wide as intermediate_size, and no dense layer
        (
            {"num_local_experts": 8},
            {TP: 2, EP: 4},
            [f"{NOT_SP} 2 {AT}", FIT + "TP2xEP4xDP4+SP, TP2xEP2xDP4+SP, PP2xEP4xDP4"],
        ),
        (
            {},
            {TP: 0, EP: -1, LOSS: True, "pipeline_model_parallel_layout": "Et*28L"},
            [
                f"actor.megatron.{TP}: found 0; allowed: at least 1",
                f"actor.megatron.{EP}: found -1; allowed: at least 1",
                f"actor.megatron: found {LOSS}, pipeline_model_parallel_layout; allowed: "
                f"{FIRST} and num_layers_in_last_pipeline_stage, or "
                f"account_for_embedding_in_pipeline_split and {LOSS}, or pipeline_model_parallel_layout",
            ],
        ),
    ],
)
def test_every_reason_and_what_would_fit(
    tmp_path: Path, model: dict[str, object], sizes: dict[str, object], expected: list[str]
) -> None:
    assert reasons(tmp_path, DENSE | model, "launcher.nproc_per_node=8", megatron(**sizes)) == expected


def test_suggestions_leave_every_data_parallel_rank_a_response(tmp_path: Path) -> None:
    few = (
        "launcher.nproc_per_node=8",
        "trainer.prompts_per_step=8",
        "algorithm.group_size=2",
        "trainer.mini_batches=8",
    )
    found = reasons(tmp_path, DENSE, *few, megatron(**{TP: 3}))
    assert found[-1] == FIT + "TP4xDP2, TP2xPP2xDP2, TP4xPP2"


def test_a_batch_that_no_layout_can_share_is_said(tmp_path: Path) -> None:
    one_layer = DENSE | {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    few = ("launcher.nproc_per_node=6", "trainer.prompts_per_step=6", "algorithm.group_size=2")
    assert "fit 6 processes: DP6, CP2xDP3, CP3xDP2" in reasons(tmp_path, one_layer, *few, megatron(**{PP: 2}))[-1]
    found = violations(tmp_path / "base.yaml", *few, "trainer.mini_batches=5", megatron(**{PP: 2}))
    assert "fit 6 processes: CP3xDP2, CP6" in found[-1]


def test_engines_share_heads_and_widths_too(tmp_path: Path) -> None:
    model = DENSE | {
        "num_key_value_heads": 6,
        "num_attention_heads": 24,
        "hidden_size": 1536,
        "intermediate_size": 1001,
    }
    found = reasons(tmp_path, model, "launcher.nproc_per_node=4", "rollout.tensor_parallel_size=4")
    key = "rollout.tensor_parallel_size: found 4; allowed: a divisor"
    assert found == [
        f"{key} or multiple of the 6 key-value heads {AT}",
        f"{key} of the model's intermediate_size, 1001 {AT}",
    ]
    (tmp_path / "model" / "config.json").write_text(json.dumps(EXPERTS | {"moe_intermediate_size": 1002}))
    wide = ("launcher.nproc_per_node=4", "rollout.tensor_parallel_size=4")
    assert "of the width of the model's experts, 1002" in "\n".join(violations(tmp_path / "base.yaml", *wide))
    experts = "rollout.vllm.enable_expert_parallel=true"
    assert "model's experts" not in "\n".join(violations(tmp_path / "base.yaml", *wide, experts))


def test_megatron_itself_takes_and_refuses_the_same_layouts(tmp_path: Path) -> None:
    run_python(Path(__file__).parent / "workers/megatron_accepts.py", [str(tmp_path / "rows.json")])
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row for row in rows if bool(row["ours"]) != bool(row["theirs"])] == []
    alone = " ".join(row["ours"][0] for row in rows if len(row["ours"]) == 1)
    for reason in (
        "x context parallel",
        "expert tensor x expert",
        "where pipeline_model_parallel_size is 1",
        "attention heads",
        "key-value heads",
        "projections",
        "intermediate_size",
        "layers: ",
        "more stages",
        "experts: ",
        "width of the model's experts",
        "has no experts",
        "found true",
        "found false",
    ):
        assert reason in alone, f"no sample was refused for {reason!r} alone"
    assert sum(row["ours"] == [] for row in rows) > 100

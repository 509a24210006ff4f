"""The spans of all ranks of random layouts: every entry is held, and once but for replicas; every engine is whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_tlt.bench.tiny_models import TINY_MODELS, family_config
from megatron_tlt.config.layouts import Layout, ModelShape, problems
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.weight_map import WeightMap
from megatron_tlt.reshard.actor_layout import actor_side, stage_layers
from megatron_tlt.reshard.engine_layout import engine_side
from megatron_tlt.reshard.plan import make_plan
from megatron_tlt.reshard.spans import Span, tensor_forms

LAYERS = 12
MODELS = ("qwen2-tied", "qwen2-untied", "qwen3-tied", "qwen3-moe", "mixtral")


@cache
def model(name: str, vocab: int = 66) -> tuple[WeightMap, ModelShape]:
    model_type, own = TINY_MODELS[name]
    sizes: dict[str, Any] = {"num_hidden_layers": LAYERS, "vocab_size": vocab, "num_key_value_heads": 2}
    config = family_config(model_type, **{**own, **sizes})
    shape = ModelShape.read(config.to_dict(), "config.json")
    assert shape is not None
    return WeightMap(config), shape


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    small, maybe = st.sampled_from((1, 2, 4)), st.sampled_from((None, None, 1, 2, 3, 4))
    tp, pp, cp = draw(small), draw(st.sampled_from((1, 2, 3, 4))), draw(st.sampled_from((1, 2)))
    given, counted = draw(st.booleans()), draw(st.booleans())
    return Layout(
        world=tp * pp * cp * draw(small),
        tp=tp,
        pp=pp,
        vpp=draw(st.sampled_from((None, 2, 3))) if pp > 1 else None,
        cp=cp,
        ep=draw(small),
        etp=draw(st.sampled_from((None, 1, 2))),
        sp=tp > 1,
        first=draw(maybe) if given and pp > 1 else None,
        last=draw(maybe) if given and pp > 1 else None,
        counts_embedding=not given and counted and draw(st.booleans()),
        counts_loss=not given and counted and draw(st.booleans()),
    )


def entries(spans: Iterable[Span]) -> Counter[tuple[str, int]]:
    return Counter((span.tensor, entry) for span in spans for entry in range(span.start, span.end))


@settings(max_examples=60)
@given(st.sampled_from(MODELS), layouts())
def test_ranks_hold_every_entry_and_replicas_apart_once(name: str, layout: Layout) -> None:
    weights, shape = model(name)
    dense = not weights.num_experts
    layout = Layout(**{**vars(layout), **({"ep": 1, "etp": None} if dense else {})})
    assume(not problems(layout, shape))
    side = actor_side(weights, layout)
    assert len(side.spans) == layout.world
    held = Counter({key: 0 for n, s in weights.shapes.items() for key in entries([Span(n, 0, s[weights.cut_dims[n]])])})
    for spans in side.spans:
        held.update(entries(spans))
    expert_replicas = layout.world // (layout.pp * layout.ep * (layout.etp or layout.tp))
    for (tensor, entry), count in held.items():
        if weights.is_expert_tensor(tensor):
            replicas = expert_replicas
        else:
            replicas = layout.cp * layout.dp
            cut = tensor.split(".")[-2].endswith(("_proj", "embed_tokens", "lm_head"))
            replicas *= 1 if cut else layout.tp
            replicas *= 2 if tensor == "model.embed_tokens.weight" and weights.tied and layout.pp > 1 else 1
        assert count == replicas, (tensor, entry)


@settings(max_examples=60)
@given(st.sampled_from(MODELS), st.sampled_from((1, 2, 4)), st.booleans(), st.sampled_from((30, 64, 66, 130)))
def test_an_engines_ranks_need_every_entry(name: str, size: int, expert_parallel: bool, vocab: int) -> None:
    weights, _ = model(name, vocab)
    side = engine_side(weights, 8, size, expert_parallel)
    for first in range(0, 8, size):
        needed: Counter[tuple[str, int]] = Counter()
        for spans in side.spans[first : first + size]:
            assert max(entries(spans).values()) == 1
            needed.update(entries(spans))
        for tensor, shape in weights.shapes.items():
            times = {needed[tensor, entry] for entry in range(shape[weights.cut_dims[tensor]])}
            kind = tensor.split(".")[-2]
            if kind in ("k_proj", "v_proj"):
                assert times == {max(1, size // 2)}, tensor
            elif kind.endswith("norm") or kind == "gate":
                assert times == {size}, tensor
            else:
                assert times == {1}, tensor


def test_experts_that_do_not_divide_go_to_the_first_ranks() -> None:
    model_type, own = TINY_MODELS["qwen3-moe"]
    weights = WeightMap(family_config(model_type, **{**own, "num_experts": 5}))
    side = engine_side(weights, 2, 2, True)
    experts = [{s.tensor.split(".experts.")[1][0] for s in spans if ".experts." in s.tensor} for spans in side.spans]
    assert experts == [{"0", "1", "2"}, {"3", "4"}]
    assert side.layout == "TP2+EP x 1"
    width = weights.shapes["model.layers.0.mlp.experts.4.down_proj.weight"][1]
    assert Span("model.layers.0.mlp.experts.4.down_proj.weight", 0, width) in side.spans[1]
    cut = engine_side(weights, 2, 2, False)
    assert Span("model.layers.0.mlp.experts.4.down_proj.weight", width // 2, width // 2) in cut.spans[1]


def test_layers_of_interleaved_and_uneven_stages() -> None:
    assert stage_layers(Layout(2, pp=2, vpp=2), 8) == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert stage_layers(Layout(4, pp=4, first=1, last=3), 8) == ((0,), (1, 2), (3, 4), (5, 6, 7))
    assert stage_layers(Layout(2, pp=2, vpp=2, first=2), 8) == ((0, 4), (1, 2, 3, 5, 6, 7))
    assert stage_layers(Layout(2, pp=2, counts_loss=True), 7) == ((0, 1, 2, 3), (4, 5, 6))


def test_what_cannot_be_placed_is_refused_by_key() -> None:
    weights, _ = model("qwen2-tied")
    with pytest.raises(ConfigError, match="pipeline_model_parallel_layout: found a layout given by hand"):
        actor_side(weights, Layout(2, pp=2, by_hand=True))
    with pytest.raises(ConfigError, match="does not divide the 3 processes"):
        actor_side(weights, Layout(3, tp=2))
    with pytest.raises(ConfigError, match="places 10 layers; the model has 12"):
        actor_side(weights, Layout(5, pp=5))
    with pytest.raises(ConfigError, match=r"rollout\.tensor_parallel_size: found 3; allowed: a divisor of the 8"):
        engine_side(weights, 8, 3, False)
    with pytest.raises(ConfigError, match=r"found 3; allowed: a divisor of 128, what it divides of .*gate_proj"):
        engine_side(weights, 3, 3, False)


@pytest.mark.parametrize("name", MODELS)
def test_every_actor_layout_fills_every_engine(name: str) -> None:
    weights, _ = model(name)
    forms = tensor_forms(weights, 2)
    actor = actor_side(weights, Layout(8, tp=2, pp=2, vpp=3, sp=True))
    for size in (1, 2, 4):
        plan = make_plan(forms, actor, engine_side(weights, 8, size, True), [0] * 4 + [1] * 4)
        assert plan.moved_bytes == plan.lower_bound > 0

"""What devices hold of a model: the reshard's spans, which tests hold against the live library, say the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_tlt.config.layouts import Layout
from megatron_tlt.models.weight_map import WeightMap
from megatron_tlt.planning.model_size import ModelSize, held
from megatron_tlt.reshard.actor_layout import actor_side, stage_layers
from megatron_tlt.reshard.spans import tensor_forms

DENSE: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 64,
    "tie_word_embeddings": False,
}
MOE = DENSE | {
    "model_type": "qwen3_moe",
    "head_dim": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
CASES = {
    "one": (DENSE, Layout(1)),
    "tied": (DENSE | {"tie_word_embeddings": True}, Layout(4, tp=2, pp=2)),
    "tied, one stage": (DENSE | {"tie_word_embeddings": True}, Layout(2, tp=2)),
    "TP2xPP4": (DENSE, Layout(8, tp=2, pp=4)),
    "interleaved": (DENSE, Layout(4, pp=2, vpp=2, tp=2)),
    "uneven": (DENSE, Layout(4, pp=4, first=1, last=1)),
    "qwen3": (DENSE | {"model_type": "qwen3", "head_dim": 16}, Layout(4, tp=4)),
    "EP4": (MOE, Layout(4, ep=4)),
    "EP2xETP1": (MOE, Layout(8, tp=2, pp=2, ep=2, etp=1, sp=True)),
    "EP2xTP2": (MOE, Layout(8, tp=2, pp=2, ep=2, sp=True)),
}


@pytest.mark.parametrize("name", CASES)
def test_devices_hold_what_the_reshard_says(name: str) -> None:
    values, layout = CASES[name]
    sizes = SimpleNamespace(**values)
    weights, model = WeightMap(sizes), ModelSize.of(sizes)
    assert model.parameters == weights.num_parameters
    side = actor_side(weights, layout)
    stages = stage_layers(layout, model.layers)
    forms = tensor_forms(weights, 1)
    for rank in range(layout.world):
        stage = rank // (layout.world // layout.pp)
        counted = held(model, layout, len(stages[stage]), stage == 0, stage == layout.pp - 1)
        assert counted.total == sum(span.length * forms[span.tensor].entry_bytes for span in side.spans[rank])


def test_a_token_passes_its_own_experts_only() -> None:
    model = ModelSize.of(SimpleNamespace(**MOE))
    layer = model.layer_attention + 2 * 3 * 32 * 16 + 8 * 32
    assert model.multiplied == 8 * layer + 64 * 32
    assert model.touched(1.0) == model.multiplied + 8 * (2 * 32 + 2 * 8)  # norms multiply nothing, and are read
    # of 8 experts, two tokens that choose 2 each leave (6/8)^2 alone
    experts = 3 * 32 * 16 * 8
    assert model.touched(2.0) == model.touched(1.0) + 8 * experts * (0.75 - 0.75**2)
    assert np.array_equal(model.touched(np.array([1.0, 2.0])), [model.touched(1.0), model.touched(2.0)])


def test_tied_embeddings_are_read_whole_and_counted_once() -> None:
    tied, untied = (ModelSize.of(SimpleNamespace(**DENSE | {"tie_word_embeddings": one})) for one in (True, False))
    assert untied.parameters - tied.parameters == tied.vocabulary == tied.embeddings == 64 * 32
    assert tied.touched(4.0) == untied.touched(4.0) == tied.parameters - tied.hidden


def test_a_draft_head_is_one_layer_and_what_joins_its_inputs() -> None:
    model = ModelSize.of(SimpleNamespace(**DENSE))
    layer = 2 * 32 * (32 + 16) + 3 * 32 * 48
    assert model.draft_head() == model.draft_layer() == layer + 2 * 32**2
    assert model.draft_layer(num_aux_layers=3) == layer + 3 * 32**2 + 32 * (32 + 2 * 16)
    assert model.draft_head(num_aux_layers=3) == model.draft_layer(num_aux_layers=3) + 64 * 32
    assert model.draft_head(num_aux_layers=3, drafted=10) == model.draft_layer(num_aux_layers=3) + 10 * 32

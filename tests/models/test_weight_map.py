"""The shards of all ranks hold every entry of every tensor, each once."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_tlt.bench.tiny_models import TINY_MODELS, family_config
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.weight_map import WeightMap


def map_of(name: str, **options: Any) -> WeightMap:
    model_type, own = TINY_MODELS[name]
    return WeightMap(family_config(model_type, **{**own, **options}))


@given(
    st.sampled_from(sorted(TINY_MODELS)),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([(8, 1), (8, 2), (8, 8)]),
    st.integers(60, 70),
)
def test_shards_hold_every_entry_once(name: str, size: int, heads: tuple[int, int], vocab: int) -> None:
    weights = map_of(name, num_attention_heads=heads[0], num_key_value_heads=heads[1], vocab_size=vocab)
    covered = {tensor: torch.zeros(shape, dtype=torch.int32) for tensor, shape in weights.shapes.items()}
    for parameter in weights.parameters:
        ranks = [weights.pieces(parameter, rank, size) for rank in range(size)]
        replicated = all(pieces == ranks[0] for pieces in ranks)
        for pieces in ranks[:1] if replicated else ranks:
            ends = sorted((piece.offset, piece.offset + piece.length) for piece in pieces)
            assert all(stop <= start for (_, stop), (start, _) in pairwise(ends)), parameter
            for piece in pieces:
                covered[piece.name].narrow(piece.dim, piece.start, piece.length).add_(1)
    assert {tensor for tensor, count in covered.items() if not bool((count == 1).all())} == set()


def test_a_groups_queries_stand_before_its_key_and_value() -> None:
    weights = map_of("llama", num_attention_heads=4, num_key_value_heads=2)
    at = "model.layers.1.self_attn."
    found = [
        (piece.name.removeprefix(at), piece.start, piece.length, piece.offset)
        for piece in weights.pieces("decoder.layers.1.self_attention.linear_qkv.weight", 1, 2)
    ]
    assert found == [("q_proj.weight", 32, 32, 0), ("k_proj.weight", 16, 16, 32), ("v_proj.weight", 16, 16, 48)]


def test_gate_and_up_are_sharded_each_by_itself() -> None:
    pieces = map_of("qwen3-moe").pieces("decoder.layers.0.mlp.experts.3.linear_fc1.weight", 1, 2)
    assert [(p.name.split("experts.")[1], p.start, p.length, p.offset) for p in pieces] == [
        ("3.gate_proj.weight", 16, 16, 0),
        ("3.up_proj.weight", 16, 16, 16),
    ]


@pytest.mark.parametrize(
    "parameter", ["decoder.layers.0.mlp.router.weight", "decoder.layers.9.input_layernorm.weight", "x"]
)
def test_a_parameter_that_the_model_lacks_is_refused(parameter: str) -> None:
    with pytest.raises(ConfigError, match="that the llama lacks"):
        map_of("llama").pieces(parameter, 0, 1)

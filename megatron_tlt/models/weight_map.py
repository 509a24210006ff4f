"""Positions of Hugging Face tensors in Megatron's parameters, for any number of tensor-parallel ranks; pure.

Megatron's names here are whole-model names: layers and experts are counted over all ranks, and norms have the names of
the local implementation (``decoder.layers.3.mlp.experts.5.linear_fc1.weight``, ``decoder.layers.3.input_layernorm
.weight``). Linear weights are (out, in), as in torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from megatron_tlt.errors import ConfigError
from megatron_tlt.models.families import family_of, head_dim

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class Piece:
    """Entries ``start .. start + length`` of tensor ``name``, at ``offset`` in a rank's parameter.

    Both are sharded along ``dim``.
    """

    name: str
    dim: int
    start: int
    length: int
    offset: int


_Span = tuple[str, int, int]
"""A tensor's name, and the start and length of a part of it."""

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(?:mlp\.experts\.(\d+)\.)?(.+)")


class WeightMap:
    """The tensors of one model and their positions in Megatron's parameters.

    Raises:
        ConfigError: the actor does not support the architecture; names ``where``.
    """

    def __init__(self, hf_config: PretrainedConfig, where: str = "model") -> None:
        self.family = family_of(hf_config, where)
        self.tied = bool(hf_config.tie_word_embeddings)
        self._config = hf_config
        self.head_dim = head_dim(hf_config)
        self.num_key_value_heads: int = hf_config.num_key_value_heads
        self._heads_per_group = hf_config.num_attention_heads // self.num_key_value_heads
        self.num_layers: int = hf_config.num_hidden_layers
        self.num_experts: int = hf_config.num_local_experts if self.family.experts else 0
        self.shapes: dict[str, tuple[int, ...]] = dict(self._shapes())
        """Every Hugging Face tensor with its shape, in the order of the model; without tied output weights."""
        self.parameters: dict[str, tuple[int, ...]] = dict(self._parameters())
        """Every unsharded parameter of Megatron with its shape; without a tied output layer."""
        self.cut_dims: dict[str, int] = {
            piece.name: piece.dim for parameter in self.parameters for piece in self.pieces(parameter, 0, 1)
        }
        """The dimension along which each Hugging Face tensor is sharded."""

    def _shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        config, family = self._config, self.family
        hidden, vocab = config.hidden_size, config.vocab_size
        yield "model.embed_tokens.weight", (vocab, hidden)
        key_value = self.num_key_value_heads * self.head_dim
        query = self._heads_per_group * key_value
        for layer in range(self.num_layers):
            at = f"model.layers.{layer}."
            yield at + "input_layernorm.weight", (hidden,)
            for part, width in (("q", query), ("k", key_value), ("v", key_value)):
                yield f"{at}self_attn.{part}_proj.weight", (width, hidden)
                if family.qkv_bias:
                    yield f"{at}self_attn.{part}_proj.bias", (width,)
            yield at + "self_attn.o_proj.weight", (hidden, query)
            if family.qk_layernorm:
                yield at + "self_attn.q_norm.weight", (self.head_dim,)
                yield at + "self_attn.k_norm.weight", (self.head_dim,)
            yield at + "post_attention_layernorm.weight", (hidden,)
            if family.experts:
                yield at + family.experts.router, (self.num_experts, hidden)
            for expert in range(self.num_experts) if family.experts else (None,):
                width = getattr(config, family.experts.width) if family.experts else config.intermediate_size
                names = family.projections(expert)
                yield at + names["gate"], (width, hidden)
                yield at + names["up"], (width, hidden)
                yield at + names["down"], (hidden, width)
        yield "model.norm.weight", (hidden,)
        if not self.tied:
            yield "lm_head.weight", (vocab, hidden)

    def _parameters(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield "embedding.word_embeddings.weight", self.shapes["model.embed_tokens.weight"]
        attention = ["input_layernorm.weight", "self_attention.linear_qkv.weight"]
        attention += ["self_attention.linear_qkv.bias"] if self.family.qkv_bias else []
        attention += ["self_attention.linear_proj.weight"]
        if self.family.qk_layernorm:
            attention += ["self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight"]
        mlps = [f"mlp.experts.{expert}." for expert in range(self.num_experts)] or ["mlp."]
        linear = [mlp + part for mlp in mlps for part in ("linear_fc1.weight", "linear_fc2.weight")]
        router = ["mlp.router.weight"] if self.num_experts else []
        for layer in range(self.num_layers):
            for tail in (*attention, "pre_mlp_layernorm.weight", *router, *linear):
                name = f"decoder.layers.{layer}.{tail}"
                yield name, self._shape(name)
        yield "decoder.final_layernorm.weight", self.shapes["model.norm.weight"]
        if not self.tied:
            yield "output_layer.weight", self.shapes["lm_head.weight"]

    def _shape(self, parameter: str) -> tuple[int, ...]:
        pieces = self.pieces(parameter, 0, 1)
        shape = list(self.shapes[pieces[0].name])
        shape[pieces[0].dim] = sum(piece.length for piece in pieces)
        return tuple(shape)

    @staticmethod
    def is_expert(parameter: str) -> bool:
        """Whether a Megatron parameter belongs to one expert, and is sharded over expert-tensor-parallel ranks."""
        return ".mlp.experts." in parameter

    @staticmethod
    def is_expert_tensor(name: str) -> bool:
        """Whether a Hugging Face tensor belongs to one expert."""
        return ".experts." in name

    def pieces(self, parameter: str, rank: int, size: int) -> tuple[Piece, ...]:
        """The pieces of the shard of ``rank`` among ``size`` tensor-parallel ranks; uncovered parts are padding.

        Raises:
            ConfigError: the model has no such parameter.
        """
        if parameter in ("embedding.word_embeddings.weight", "output_layer.weight"):
            tied = self.tied or parameter.startswith("embedding")
            name = "model.embed_tokens.weight" if tied else "lm_head.weight"
            padded = -(-self.shapes[name][0] // size) * size  # equal rows on every rank
            return self._cut([self._whole(name, 0)], 0, padded, rank, size)
        if parameter == "decoder.final_layernorm.weight":
            return self._cut([self._whole("model.norm.weight", 0)], 0, None, 0, 1)
        found = _LAYER.fullmatch(parameter)
        pieces = self._layer_pieces(int(found[1]), found[2], found[3], rank, size) if found else ()
        if not pieces or any(piece.name not in self.shapes for piece in pieces):
            raise ConfigError(f"Megatron-Core has a parameter {parameter!r} that the {self.family.model_type} lacks")
        return pieces

    def _layer_pieces(
        self, layer: int, expert: str | None, tail: str, rank: int, size: int
    ) -> tuple[Piece, ...] | None:
        at = f"model.layers.{layer}."
        projections = {k: at + v for k, v in self.family.projections(int(expert) if expert else None).items()}
        whole = {
            "input_layernorm.weight": "input_layernorm.weight",
            "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
            "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
            "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
            "mlp.router.weight": self.family.experts.router if self.family.experts else "",
        }
        if tail in whole:
            name = at + whole[tail]
            return self._cut([self._whole(name, 0)], 0, None, 0, 1)
        match tail.removeprefix("mlp."):
            case "self_attention.linear_qkv.weight" | "self_attention.linear_qkv.bias":
                kind = tail.rpartition(".")[2]
                return self._cut(list(self._query_key_value(at, kind)), 0, None, rank, size)
            case "self_attention.linear_proj.weight":
                return self._cut([self._whole(at + "self_attn.o_proj.weight", 1)], 1, None, rank, size)
            case "linear_fc1.weight":
                # gate and up are sharded separately, so that a rank can multiply its own halves
                gate = self._cut([self._whole(projections["gate"], 0)], 0, None, rank, size)
                behind = sum(piece.length for piece in gate)
                up = self._cut([self._whole(projections["up"], 0)], 0, None, rank, size)
                return gate + tuple(Piece(p.name, p.dim, p.start, p.length, p.offset + behind) for p in up)
            case "linear_fc2.weight":
                return self._cut([self._whole(projections["down"], 1)], 1, None, rank, size)
        return ()

    def _query_key_value(self, at: str, kind: str) -> Iterator[_Span]:
        """For each group its queries, then its key, then its value."""
        names = [f"{at}self_attn.{part}_proj.{kind}" for part in ("q", "k", "v")]
        for group in range(self.num_key_value_heads):
            for name, heads in zip(names, (self._heads_per_group, 1, 1), strict=True):
                yield name, group * heads * self.head_dim, heads * self.head_dim

    def _whole(self, name: str, dim: int) -> _Span:
        return name, 0, self.shapes.get(name, (0, 0))[dim]

    @staticmethod
    def _cut(spans: list[_Span], dim: int, total: int | None, rank: int, size: int) -> tuple[Piece, ...]:
        """The share of ``rank`` in the concatenated spans."""
        total = sum(length for _, _, length in spans) if total is None else total
        low, high = total * rank // size, total * (rank + 1) // size
        pieces, at = [], 0
        for name, start, length in spans:
            first, last = max(at, low), min(at + length, high)
            if first < last:
                pieces.append(Piece(name, dim, start + first - at, last - first, first - low))
            at += length
        return tuple(pieces)

    @property
    def num_parameters(self) -> int:
        """Total number of weights."""
        return sum(prod(shape) for shape in self.shapes.values())

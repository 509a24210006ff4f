"""Sizes of a model that determine memory and time, and its parameters by their placement in a layout; pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron_tlt.config.layouts import Layout, ModelShape
from megatron_tlt.models.families import FAMILIES, head_dim

Count = TypeVar("Count", float, NDArray[np.float64])


@dataclass(frozen=True)
class ModelSize:
    """A decoder with RMSNorm, SwiGLU and grouped-query attention; widths are counts of numbers."""

    layers: int
    hidden: int
    heads: int
    groups: int
    head_dim: int
    ffn: int
    """Width of a dense feed-forward layer, or of one expert."""
    vocab: int
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: int = 0
    top_k: int = 0
    """Number of experts per token."""
    dense_ffn: int = 0
    """Width of a dense layer, even if the model has none: a drafter's layer uses it."""

    @classmethod
    def of(cls, sizes: Any) -> ModelSize:
        """Converts the result of ``models.architecture.sizes_of``."""
        family = FAMILIES[sizes.model_type]
        experts = int(sizes.num_local_experts) if family.experts else 0
        return cls(
            layers=sizes.num_hidden_layers,
            hidden=sizes.hidden_size,
            heads=sizes.num_attention_heads,
            groups=sizes.num_key_value_heads,
            head_dim=head_dim(sizes),
            ffn=getattr(sizes, family.experts.width) if family.experts else sizes.intermediate_size,
            vocab=sizes.vocab_size,
            tied=bool(sizes.tie_word_embeddings),
            qkv_bias=family.qkv_bias,
            qk_norm=family.qk_layernorm,
            experts=experts,
            top_k=int(sizes.num_experts_per_tok) if experts else 0,
            dense_ffn=sizes.intermediate_size,
        )

    @property
    def shape(self) -> ModelShape:
        """The sizes that a layout divides."""
        return ModelShape(
            layers=self.layers,
            heads=self.heads,
            kv_groups=self.groups,
            head_dim=self.head_dim,
            ffn=None if self.experts else self.ffn,
            experts=self.experts,
            moe_ffn=self.ffn if self.experts else None,
        )

    @property
    def query(self) -> int:
        """Width of all queries."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        """Width of all keys; values have the same width."""
        return self.groups * self.head_dim

    @property
    def layer_attention(self) -> int:
        """Weights of a layer's attention, which tensor parallelism shards."""
        projections = self.query + 2 * self.key
        return self.hidden * (projections + self.query) + (projections if self.qkv_bias else 0)

    @property
    def layer_norms(self) -> int:
        """Weights of a layer that every tensor-parallel rank holds: norms, and a router."""
        return 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0) + self.experts * self.hidden

    @property
    def layer_feed_forward(self) -> int:
        """Weights of a layer's feed-forward part, including all experts."""
        return 3 * self.hidden * self.ffn * max(1, self.experts)

    @property
    def layer(self) -> int:
        """All weights of a layer."""
        return self.layer_attention + self.layer_norms + self.layer_feed_forward

    @property
    def active_layer(self) -> int:
        """Weights of a layer that a token is multiplied with: only its experts."""
        chosen = self.top_k or 1
        return self.layer_attention + 3 * self.hidden * self.ffn * chosen + self.experts * self.hidden

    @property
    def vocabulary(self) -> int:
        """Weights of the embedding, and of an output layer."""
        return self.vocab * self.hidden

    @property
    def embeddings(self) -> int:
        """Weights of embedding and output layer, which may be tied."""
        return self.vocabulary * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        """All weights."""
        return self.layers * self.layer + self.hidden + self.embeddings

    @property
    def multiplied(self) -> int:
        """Weights that a token is multiplied with; the embedding is only a lookup."""
        return self.layers * self.active_layer + self.vocabulary

    @property
    def cached(self) -> int:
        """Numbers per token in the KV cache, over all layers."""
        return 2 * self.layers * self.key

    def touched(self, tokens: Count) -> Count:
        """Weights that one pass over ``tokens`` tokens reads, with experts chosen uniformly."""
        chosen = 1.0 - (1.0 - (self.top_k or 1) / (self.experts or 1)) ** tokens
        layer = self.layer_attention + self.layer_norms + self.layer_feed_forward * chosen
        return self.layers * layer + self.vocabulary

    def draft_layer(self, num_aux_layers: int = 0) -> int:
        """Weights of a draft head's layer over this model's hidden states, including the projection of its inputs.

        Args:
            num_aux_layers: number of hidden states that an EAGLE-3 head reads; its attention takes embedding and
                features concatenated. 0: an EAGLE head, which joins embedding and last hidden state.
        """
        layer = 2 * self.hidden * (self.query + self.key) + 3 * self.hidden * self.dense_ffn
        if not num_aux_layers:
            return 2 * self.hidden**2 + layer
        return num_aux_layers * self.hidden**2 + layer + self.hidden * (self.query + 2 * self.key)

    def draft_head(self, num_aux_layers: int = 0, drafted: int | None = None) -> int:
        """Weights that a draft head learns; EAGLE-3 has its own output layer, over ``drafted`` tokens or all."""
        return self.draft_layer(num_aux_layers) + (self.hidden * (drafted or self.vocab) if num_aux_layers else 0)


@dataclass(frozen=True)
class Held:
    """Weights on one device: those that data parallelism replicates, and experts', which EP shards first."""

    dense: int
    expert: int

    @property
    def total(self) -> int:
        return self.dense + self.expert


def held(model: ModelSize, layout: Layout, layers: int, first: bool, last: bool) -> Held:
    """Weights of a device in a pipeline stage of ``layers`` layers under ``layout``."""
    tp = layout.tp
    attention = model.layer_attention // tp + model.layer_norms
    vocabulary = -(-model.vocab // tp) * model.hidden
    dense = layers * attention
    # the last stage has a copy of a tied embedding, unless it is also the first one
    dense += vocabulary * (first + (last and not (first and model.tied))) + (model.hidden if last else 0)
    if not model.experts:
        return Held(dense + layers * model.layer_feed_forward // tp, 0)
    return Held(dense, layers * model.layer_feed_forward // ((layout.etp or tp) * layout.ep))

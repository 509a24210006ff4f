"""How long an engine's steps take: data moved and work done over what the device reaches of its data sheet.

Reading weights and computing are taken not to overlap, so that a step costs a fixed part and a part for each token, as
DAS (2511.13841, length-aware budget) measures it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_tlt.planning.devices import Device
from megatron_tlt.planning.simulation.acceptance import Draft
from megatron_tlt.planning.simulation.constants import Constants

Array = NDArray[np.float64]
_BYTES = 2
"""Of a weight and of an entry of the KV cache."""


@dataclass(frozen=True)
class ModelSizes:
    """What a model weighs."""

    layers: int
    hidden: int
    query_width: int
    key_value_width: int
    vocab: int
    attention: int
    """Of one layer."""
    mlp: int
    """Of one layer, or of one of its experts."""
    experts: int = 0
    experts_per_token: int = 0
    tied: bool = False
    """Whether embedding and output head are one."""

    @classmethod
    def read(cls, sizes: Any) -> ModelSizes:
        """From what ``models.architecture.sizes_of`` gives."""
        hidden, heads, key_values = sizes.hidden_size, sizes.num_attention_heads, sizes.num_key_value_heads
        head = getattr(sizes, "head_dim", None) or hidden // heads
        experts = getattr(sizes, "num_local_experts", 0) or 0
        width = (experts and getattr(sizes, "moe_intermediate_size", 0)) or sizes.intermediate_size
        return cls(
            layers=sizes.num_hidden_layers,
            hidden=hidden,
            query_width=heads * head,
            key_value_width=key_values * head,
            vocab=sizes.vocab_size,
            attention=2 * hidden * (heads + key_values) * head,
            mlp=3 * hidden * width,
            experts=experts,
            experts_per_token=sizes.num_experts_per_tok if experts else 0,
            tied=bool(sizes.tie_word_embeddings),
        )

    @property
    def parameters(self) -> int:
        """All."""
        mlps = max(1, self.experts) * self.mlp + self.experts * self.hidden
        return self.layers * (self.attention + mlps) + (1 if self.tied else 2) * self.vocab * self.hidden

    @property
    def active(self) -> int:
        """That a token is multiplied with."""
        mlps = max(1, self.experts_per_token) * self.mlp
        return self.layers * (self.attention + mlps) + self.vocab * self.hidden

    @property
    def drafter(self) -> int:
        """Those that an EAGLE head learns: one dense layer and what joins embedding and hidden state."""
        return self.attention + max(1, self.experts_per_token) * self.mlp + 2 * self.hidden**2

    @property
    def kv_bytes(self) -> int:
        """Of one token's KV cache, all layers."""
        return self.layers * 2 * self.key_value_width * _BYTES

    def touched(self, tokens: ArrayLike) -> Array:
        """Parameters that are read for so many tokens: of many experts only those that any token takes."""
        n = np.asarray(tokens, dtype=np.float64)
        mlps = np.full_like(n, float(self.mlp))
        if self.experts:
            mlps = self.mlp * self.experts * (1.0 - (1.0 - self.experts_per_token / self.experts) ** n)
        return self.layers * (self.attention + mlps) + self.vocab * self.hidden


class EngineModel:
    """One engine of ``tp`` devices.

    ``batch`` counts requests, ``context`` the tokens in their KV caches together; both may be arrays, the results are
    seconds.
    """

    def __init__(self, model: ModelSizes, device: Device, tp: int, constants: Constants) -> None:
        self.model, self.device, self.tp, self.constants = model, device, tp, constants
        self._per_byte = 1.0 / (tp * device.memory_bandwidth * constants.memory_efficiency)
        self._per_flop = 1.0 / (tp * device.flops * constants.compute_efficiency)
        share = 2.0 * (tp - 1) / tp
        self._per_reduced_byte = share / (device.node_bandwidth * constants.link_efficiency)
        self._latency = constants.all_reduce_latency_s if tp > 1 else 0.0

    def _reduced(self, tokens: Array) -> Array:
        """One all-reduce of the tokens' hidden states."""
        return self._latency + tokens * self.model.hidden * _BYTES * self._per_reduced_byte

    def _pass(self, tokens: Array, per_request: float, context: Array) -> Array:
        """The target over ``tokens``, ``per_request`` of each request's."""
        model = self.model
        weights = model.touched(tokens) * _BYTES * self._per_byte + 2.0 * model.active * tokens * self._per_flop
        work = 4.0 * model.layers * model.query_width * per_request * context * self._per_flop
        return weights + context * model.kv_bytes * self._per_byte + work + 2 * model.layers * self._reduced(tokens)

    def _draft_pass(self, tokens: Array, context: Array) -> Array:
        model = self.model
        parameters = model.drafter + model.vocab * model.hidden
        weights = parameters * (_BYTES * self._per_byte + 2.0 * tokens * self._per_flop)
        caches = context * (model.kv_bytes / model.layers) * self._per_byte
        return weights + caches + 2 * self._reduced(tokens) + self.constants.draft_overhead_s

    def plain(self, batch: ArrayLike, context: ArrayLike) -> Array:
        """A step without speculation."""
        b, c = np.asarray(batch, dtype=np.float64), np.asarray(context, dtype=np.float64)
        return self._pass(b, 1.0, c) + self.constants.step_overhead_s

    def round(self, batch: ArrayLike, context: ArrayLike, draft: Draft) -> Array:
        """A step that drafts and verifies; a drafter without a model costs one draft pass's overhead."""
        if not draft.depth:
            return self.plain(batch, context)
        b, c = np.asarray(batch, dtype=np.float64), np.asarray(context, dtype=np.float64)
        verified = self._pass(b * draft.verify, draft.verify, c) + self.constants.step_overhead_s
        if draft.model_free:
            return verified + self.constants.draft_overhead_s
        return verified + draft.depth * self._draft_pass(b * draft.top_k, c)

    def prefill(self, tokens: ArrayLike) -> Array:
        """Prompts, or a pre-empted request's tokens again: bound by compute."""
        return 2.0 * self.model.active * np.asarray(tokens, dtype=np.float64) * self._per_flop

    def kv_tokens(self, memory_fraction: float) -> float:
        """Tokens that fit beside the weights where the engine may take this fraction of each device's memory."""
        weights = self.model.parameters * _BYTES
        return (memory_fraction * self.device.memory_bytes * self.tp - weights) / self.model.kv_bytes

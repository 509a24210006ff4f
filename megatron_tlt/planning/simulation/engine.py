"""Time of an engine's steps: data moved and work done, divided by the device's achieved rates.

Reading weights and computing are assumed not to overlap, so a step has a fixed cost and a cost per token, as DAS
(2511.13841, length-aware budget) measures it. The gain by drafts depends on the second, whose constants are derived
from published tables. `planning.rollout_time` takes the larger of the two, as profiles measure them separately.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_tlt.planning.devices import DeviceSpec
from megatron_tlt.planning.model_size import ModelSize
from megatron_tlt.planning.simulation.acceptance import DraftShape
from megatron_tlt.planning.simulation.constants import Constants

Array = NDArray[np.float64]
_BYTES = 2
"""Bytes of a weight and of an entry of the KV cache."""


class EngineModel:
    """One engine of ``tp`` devices.

    ``batch`` is the number of requests, ``context`` the total tokens in their KV caches; both may be arrays, the
    results are seconds. ``draft_weights`` are read in one pass of the draft head; by default those of an EAGLE head,
    including the model's output layer.
    """

    def __init__(
        self, model: ModelSize, device: DeviceSpec, tp: int, constants: Constants, draft_weights: int | None = None
    ) -> None:
        self.model, self.device, self.tp, self.constants = model, device, tp, constants
        self._draft_weights = draft_weights or model.draft_layer() + model.vocabulary
        self._per_byte = 1.0 / (tp * device.memory_bandwidth * constants.memory_efficiency)
        self._per_flop = 1.0 / (tp * device.flops * constants.compute_efficiency)
        share = 2.0 * (tp - 1) / tp
        self._per_reduced_byte = share / (device.node_bandwidth * constants.node_link_efficiency)
        self._latency = constants.all_reduce_latency_s if tp > 1 else 0.0

    def _reduced(self, tokens: Array) -> Array:
        """Seconds of one all-reduce of the tokens' hidden states."""
        return self._latency + tokens * self.model.hidden * _BYTES * self._per_reduced_byte

    def _pass(self, tokens: Array, per_request: float, context: Array) -> Array:
        """Seconds of a target pass over ``tokens`` tokens, ``per_request`` of each request."""
        model = self.model
        weights = model.touched(tokens) * _BYTES * self._per_byte + 2.0 * model.multiplied * tokens * self._per_flop
        work = 4.0 * model.layers * model.query * per_request * context * self._per_flop
        caches = context * model.cached * _BYTES * self._per_byte
        return weights + caches + work + 2 * model.layers * self._reduced(tokens)

    def _draft_pass(self, tokens: Array, context: Array) -> Array:
        model = self.model
        weights = self._draft_weights * (_BYTES * self._per_byte + 2.0 * tokens * self._per_flop)
        caches = context * (model.cached / model.layers) * _BYTES * self._per_byte
        return weights + caches + 2 * self._reduced(tokens) + self.constants.draft_overhead_s

    def plain(self, batch: ArrayLike, context: ArrayLike) -> Array:
        """Seconds of a step without speculation."""
        b, c = np.asarray(batch, dtype=np.float64), np.asarray(context, dtype=np.float64)
        return self._pass(b, 1.0, c) + self.constants.step_overhead_s

    def round(self, batch: ArrayLike, context: ArrayLike, draft: DraftShape) -> Array:
        """Seconds of a step that drafts and verifies; a drafter without a model costs one draft pass's overhead."""
        if not draft.depth:
            return self.plain(batch, context)
        b, c = np.asarray(batch, dtype=np.float64), np.asarray(context, dtype=np.float64)
        verified = self._pass(b * draft.verify, draft.verify, c) + self.constants.step_overhead_s
        if draft.model_free:
            return verified + self.constants.draft_overhead_s
        return verified + draft.depth * self._draft_pass(b * draft.top_k, c)

    def prefill(self, tokens: ArrayLike) -> Array:
        """Seconds for prompts, or for recomputing a preempted request; compute-bound."""
        return 2.0 * self.model.multiplied * np.asarray(tokens, dtype=np.float64) * self._per_flop

    def kv_tokens(self, memory_fraction: float) -> float:
        """Tokens that fit beside the weights if the engine uses this fraction of each device's memory."""
        weights = self.model.parameters * _BYTES
        return (memory_fraction * self.device.memory_bytes * self.tp - weights) / (self.model.cached * _BYTES)

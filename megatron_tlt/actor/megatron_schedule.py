"""Micro-batches through Megatron's pipeline schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_tlt.actor.batches import MicroBatch, MicroBatches
from megatron_tlt.actor.megatron_layers import packed_seq_params
from megatron_tlt.actor.megatron_model import MegatronModel
from megatron_tlt.actor.megatron_routing import RouterReplays
from megatron_tlt.actor.scores import on_this_context_rank

AfterForward = Callable[..., Any]


def run_passes(
    model: MegatronModel,
    routing: RouterReplays,
    batches: MicroBatches,
    began: Callable[[MicroBatch], None],
    after_forward: AfterForward,
    *,
    forward_only: bool,
) -> list[Any]:
    """Runs all micro-batches; returns the results of ``after_forward`` on the last stage.

    ``began`` is called as a micro-batch enters this rank. ``after_forward`` receives a micro-batch and this rank's
    share of its logits, (R, T/C, V/TP).
    """
    # Megatron would widen all logits of a micro-batch at once; the scores widen them chunk by chunk
    as_computed = {"fp32_output": False} if model.config.bf16 else {}

    def forward_step(iterator: Iterator[MicroBatch], chunk: Any) -> tuple[torch.Tensor, Any]:
        batch = next(iterator)
        held = on_this_context_rank(batch)
        packed = packed_seq_params(batch.cu_seqlens) if batch.packed else None
        if chunk is chunks[0]:
            began(batch)
        routing.load(chunks.index(chunk), held)
        output = chunk(held.tokens_RT, held.positions_RT, None, packed_seq_params=packed, **as_computed)
        return output, partial(after_forward, batch)

    chunks = model.ddp_chunks
    rows, width = batches[0].tokens_RT.shape
    routing.begin(training=not forward_only, has_routes=batches[0].routes_RTF is not None)
    results: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(batches) for _ in chunks] if len(chunks) > 1 else iter(batches),
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(batches),
        seq_length=width,
        micro_batch_size=rows,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
    return results

"""Samples as padded tensors, in micro-batches bounded by tokens.

Shapes: B sequences of T label positions; position t predicts token t + 1. Sequences are padded on the right, where
causal attention never looks, so no attention mask is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_tlt.algorithms.losses import LossInputs
from megatron_tlt.algorithms.types import TrainingSample
from megatron_tlt.data.packing import plan_micro_batches


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass: tokens, labels and loss columns of the samples named by ``indices``."""

    indices: tuple[int, ...]
    tokens_BT: torch.Tensor
    labels_BT: torch.Tensor
    positions_BT: torch.Tensor
    loss_inputs: LossInputs
    response_spans: tuple[tuple[int, int], ...]

    def response_rows(self, values_BT: torch.Tensor) -> list[tuple[float, ...]]:
        """The entries of ``values_BT`` that belong to response tokens, sample by sample."""
        rows = values_BT.float().cpu()
        return [tuple(rows[i, start:stop].tolist()) for i, (start, stop) in enumerate(self.response_spans)]


def _columns(samples: Sequence[TrainingSample], width: int, device: torch.device) -> LossInputs:
    shape = (len(samples), width)
    mask = torch.zeros(shape)
    advantages = torch.zeros(shape)
    old = torch.zeros(shape)
    reference = torch.zeros(shape)
    weights = torch.ones(shape)
    for i, sample in enumerate(samples):
        span = slice(sample.prompt_length - 1, len(sample.token_ids) - 1)
        mask[i, span] = 1.0
        advantages[i, span] = sample.advantage
        for column, values in (
            (old, sample.old_log_probs),
            (reference, sample.reference_log_probs),
            (weights, sample.token_weights),
        ):
            if values:
                column[i, span] = torch.tensor(values)
    return LossInputs(*(t.to(device) for t in (mask, advantages, old, reference, weights)))


def collate(
    samples: Sequence[TrainingSample], indices: Sequence[int], pad_to_multiple: int, device: torch.device
) -> MicroBatch:
    """Pads ``samples[i] for i in indices`` to one length, a multiple of ``pad_to_multiple``."""
    chosen = [samples[i] for i in indices]
    longest = max(len(sample.token_ids) for sample in chosen)
    width = -(-longest // pad_to_multiple) * pad_to_multiple
    tokens = torch.zeros((len(chosen), width + 1), dtype=torch.int64)
    for i, sample in enumerate(chosen):
        tokens[i, : len(sample.token_ids)] = torch.tensor(sample.token_ids)
    tokens = tokens.to(device)
    return MicroBatch(
        indices=tuple(indices),
        tokens_BT=tokens[:, :-1].contiguous(),
        labels_BT=tokens[:, 1:].contiguous(),
        positions_BT=torch.arange(width, device=device).expand(len(chosen), width),
        loss_inputs=_columns(chosen, width, device),
        response_spans=tuple((s.prompt_length - 1, len(s.token_ids) - 1) for s in chosen),
    )


def micro_batches(
    samples: Sequence[TrainingSample], max_tokens: int, pad_to_multiple: int, device: torch.device
) -> list[MicroBatch]:
    """Groups samples of similar length so that padding is small and no micro-batch exceeds ``max_tokens``."""
    plan = plan_micro_batches([len(sample.token_ids) for sample in samples], max_tokens)
    return [collate(samples, indices, pad_to_multiple, device) for indices in plan]

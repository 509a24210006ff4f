"""Samples as tensors, in micro-batches bounded by tokens: packed one behind another, or padded to one length.

Shapes: R rows of T tokens go through the model; position t predicts the token behind it. Packed, R is 1 and
``cu_seqlens`` says where a sample begins and ends (Megatron's ``thd``); padded, a row is a sample and causal attention
never looks at the padding, so no mask is needed. Losses see B samples of W label positions in both cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_tlt.algorithms.losses import LossInputs
from megatron_tlt.algorithms.types import TrainingSample
from megatron_tlt.data.packing import plan_micro_batches, plan_packs, sequence_cost, split_to_multiple


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass: tokens and labels for the model, loss columns of the samples named by ``indices``."""

    indices: tuple[int, ...]
    tokens_RT: torch.Tensor
    labels_RT: torch.Tensor
    positions_RT: torch.Tensor
    cu_seqlens: tuple[int, ...]
    """Packed: ends of the sequences in the row, from 0; empty where padded."""
    loss_inputs: LossInputs
    response_spans: tuple[tuple[int, int], ...]
    gather_BW: torch.Tensor | None
    """Packed: where in the row a sample's label position is; 0 behind its end, where the loss mask is 0."""

    def by_sample(self, values_RT: torch.Tensor) -> torch.Tensor:
        """One value per token of the rows, as (B, W)."""
        return values_RT if self.gather_BW is None else values_RT[0][self.gather_BW]

    def response_rows(self, values_BW: torch.Tensor) -> list[tuple[float, ...]]:
        """The entries of ``values_BW`` that belong to response tokens, sample by sample."""
        rows = values_BW.float().cpu()
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


def _spans(samples: Sequence[TrainingSample]) -> tuple[tuple[int, int], ...]:
    return tuple((s.prompt_length - 1, len(s.token_ids) - 1) for s in samples)


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
        tokens_RT=tokens[:, :-1].contiguous(),
        labels_RT=tokens[:, 1:].contiguous(),
        positions_RT=torch.arange(width, device=device).expand(len(chosen), width),
        cu_seqlens=(),
        loss_inputs=_columns(chosen, width, device),
        response_spans=_spans(chosen),
        gather_BW=None,
    )


def pack(
    samples: Sequence[TrainingSample], indices: Sequence[int], pad_to_multiple: int, device: torch.device
) -> MicroBatch:
    """Lays ``samples[i] for i in indices`` one behind another in one row, a multiple of ``pad_to_multiple`` long.

    A sample's last token predicts nothing and is left out. What fills up the row is a sequence of its own.
    """
    chosen = [samples[i] for i in indices]
    lengths = [len(sample.token_ids) - 1 for sample in chosen]
    filler = -sum(lengths) % pad_to_multiple
    ends = torch.tensor([0, *lengths, *([filler] if filler else [])]).cumsum(0).tolist()
    tokens = [token for sample in chosen for token in sample.token_ids[:-1]] + [0] * filler
    labels = [token for sample in chosen for token in sample.token_ids[1:]] + [0] * filler
    positions = [t for length in (*lengths, filler) for t in range(length)]
    gather = torch.zeros((len(chosen), max(lengths)), dtype=torch.int64)
    for i, length in enumerate(lengths):
        gather[i, :length] = torch.arange(ends[i], ends[i + 1])
    return MicroBatch(
        indices=tuple(indices),
        tokens_RT=torch.tensor([tokens], device=device),
        labels_RT=torch.tensor([labels], device=device),
        positions_RT=torch.tensor([positions], device=device),
        cu_seqlens=tuple(ends),
        loss_inputs=_columns(chosen, max(lengths), device),
        response_spans=_spans(chosen),
        gather_BW=gather.to(device),
    )


def micro_batches(
    samples: Sequence[TrainingSample],
    max_tokens: int,
    pad_to_multiple: int,
    device: torch.device,
    *,
    packed: bool,
    attention_share: float = 0.0,
    count_multiple_of: int = 1,
) -> list[MicroBatch]:
    """Groups samples so that no micro-batch exceeds ``max_tokens``: of like cost if ``packed``, else of like length.

    ``attention_share`` is that of ``data.packing.sequence_cost``. There are a multiple of ``count_multiple_of``.
    """
    lengths = [len(sample.token_ids) for sample in samples]
    costs = [sequence_cost(length, attention_share) for length in lengths]
    groups = plan_packs(lengths, costs, max_tokens) if packed else plan_micro_batches(lengths, max_tokens)
    form = pack if packed else collate
    return [
        form(samples, group, pad_to_multiple, device) for group in split_to_multiple(groups, costs, count_multiple_of)
    ]

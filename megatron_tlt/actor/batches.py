"""Samples as tensors, in micro-batches bounded by tokens: packed one behind another, or padded to one length.

Shapes: R rows of T tokens go through the model; position t predicts the token behind it. Packed, R is 1 and
``cu_seqlens`` says where a sample begins and ends (Megatron's ``thd``); padded, a row is a sample and causal attention
never looks at the padding, so no mask is needed. Losses see B samples of W label positions in both cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from megatron_tlt.actor.context import context_positions
from megatron_tlt.algorithms.losses import LossInputs
from megatron_tlt.algorithms.types import TrainingSample
from megatron_tlt.data.packing import balance, plan_micro_batches, plan_packs, sequence_cost, split_to_count


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass: tokens and labels for the model, loss columns of the samples named by ``indices``."""

    indices: tuple[int, ...]
    tokens_RT: torch.Tensor
    labels_RT: torch.Tensor
    positions_RT: torch.Tensor
    cu_seqlens: tuple[int, ...]
    """Ends of the sequences in a row, from 0; padded, the one row is one sequence."""
    loss_inputs: LossInputs
    response_spans: tuple[tuple[int, int], ...]
    gather_BW: torch.Tensor | None
    """Packed: where in the row a sample's label position is; 0 behind its end, where the loss mask is 0."""

    @property
    def packed(self) -> bool:
        return self.gather_BW is not None

    def by_sample(self, values_RT: torch.Tensor) -> torch.Tensor:
        """One value per token of the rows, as (B, W)."""
        # without samples there is still a row, so that the pass happens
        return values_RT[: len(self.indices)] if self.gather_BW is None else values_RT[0][self.gather_BW]

    def on_context_rank(self, rank: int, size: int) -> MicroBatch:
        """The tokens and labels that a context-parallel rank holds, (R, T/size); everything else as it was."""
        if size == 1:
            return self
        index = torch.tensor(context_positions(self.cu_seqlens, rank, size), device=self.tokens_RT.device)
        rows = (self.tokens_RT, self.labels_RT, self.positions_RT)
        tokens, labels, positions = (tensor[:, index].contiguous() for tensor in rows)
        return replace(self, tokens_RT=tokens, labels_RT=labels, positions_RT=positions)

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
    longest = max((len(sample.token_ids) for sample in chosen), default=1)
    width = -(-longest // pad_to_multiple) * pad_to_multiple
    rows = max(1, len(chosen))
    tokens = torch.zeros((rows, width + 1), dtype=torch.int64)
    for i, sample in enumerate(chosen):
        tokens[i, : len(sample.token_ids)] = torch.tensor(sample.token_ids)
    tokens = tokens.to(device)
    return MicroBatch(
        indices=tuple(indices),
        tokens_RT=tokens[:, :-1].contiguous(),
        labels_RT=tokens[:, 1:].contiguous(),
        positions_RT=torch.arange(width, device=device).expand(rows, width),
        cu_seqlens=(0, width),
        loss_inputs=_columns(chosen, width, device),
        response_spans=_spans(chosen),
        gather_BW=None,
    )


def pack(
    samples: Sequence[TrainingSample],
    indices: Sequence[int],
    pad_to_multiple: int,
    device: torch.device,
    pad_each_to: int = 1,
) -> MicroBatch:
    """Lays ``samples[i] for i in indices`` one behind another in one row, a multiple of ``pad_to_multiple`` long.

    A sample's last token predicts nothing and is left out. Each sequence is padded to a multiple of ``pad_each_to``;
    what fills up the row is a sequence of its own.
    """
    chosen = [samples[i] for i in indices]
    lengths = [len(sample.token_ids) - 1 for sample in chosen]
    spans = [-(-length // pad_each_to) * pad_each_to for length in lengths]
    filler = -sum(spans) % pad_to_multiple or (0 if spans else pad_to_multiple)
    ends = torch.tensor([0, *spans, *([filler] if filler else [])]).cumsum(0).tolist()
    row = torch.zeros((2, ends[-1]), dtype=torch.int64)
    gather = torch.zeros((len(chosen), max(lengths, default=0)), dtype=torch.int64)
    for i, (sample, length) in enumerate(zip(chosen, lengths, strict=True)):
        at = slice(ends[i], ends[i] + length)
        row[0, at], row[1, at] = torch.tensor(sample.token_ids[:-1]), torch.tensor(sample.token_ids[1:])
        gather[i, :length] = torch.arange(at.start, at.stop)
    positions = torch.cat([torch.arange(stop - start) for start, stop in pairwise(ends)])
    return MicroBatch(
        indices=tuple(indices),
        tokens_RT=row[:1].to(device),
        labels_RT=row[1:].to(device),
        positions_RT=positions[None].to(device),
        cu_seqlens=tuple(ends),
        loss_inputs=_columns(chosen, gather.shape[1], device),
        response_spans=_spans(chosen),
        gather_BW=gather.to(device),
    )


@dataclass(frozen=True)
class BatchShape:
    """What micro-batches must be like.

    ``max_tokens`` bounds their tokens, padding of single sequences not counted; ``attention_share`` is that of
    ``data.packing.sequence_cost``. There are a multiple of ``count_multiple_of``, and with ``equal_counts`` as many on
    every data-parallel rank: where experts are spread over these ranks, a pass of one needs all. Tensor parallelism
    with sequence parallelism and context parallelism cut a row in parts of one length.
    """

    max_tokens: int
    packed: bool = True
    attention_share: float = 0.0
    count_multiple_of: int = 1
    equal_counts: bool = False
    sequence_parallel_size: int = 1
    context_parallel_size: int = 1


def plan_shares(lengths: Sequence[int], shape: BatchShape, ranks: int) -> list[list[list[int]]]:
    """For each data-parallel rank its micro-batches as lists of indices into ``lengths``: at least one, empty or not.

    Raises:
        ConfigError: a sequence is longer than ``shape.max_tokens``.
    """
    costs = [sequence_cost(length, shape.attention_share) for length in lengths]
    shares = []
    for share in balance(costs, ranks):
        own, own_costs = [lengths[i] for i in share], [costs[i] for i in share]
        plan = (
            plan_packs(own, own_costs, shape.max_tokens) if shape.packed else plan_micro_batches(own, shape.max_tokens)
        )
        shares.append([[share[i] for i in group] for group in plan])
    most = max(len(groups) for groups in shares)
    counts = [most if shape.equal_counts else len(groups) for groups in shares]
    rounded = [-(-max(1, count) // shape.count_multiple_of) * shape.count_multiple_of for count in counts]
    return [split_to_count(groups, costs, count) for groups, count in zip(shares, rounded, strict=True)]


def form_micro_batches(
    samples: Sequence[TrainingSample], groups: Sequence[Sequence[int]], shape: BatchShape, device: torch.device
) -> list[MicroBatch]:
    """The samples of each group as tensors, whole rows."""
    context = 2 * shape.context_parallel_size if shape.context_parallel_size > 1 else 1
    multiple = context * shape.sequence_parallel_size
    if shape.packed:
        return [pack(samples, group, multiple, device, pad_each_to=context) for group in groups]
    return [collate(samples, group, multiple, device) for group in groups]

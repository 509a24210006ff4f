"""Samples as tensors, in micro-batches bounded by tokens: packed into one row, or padded to equal length.

Shapes: the model processes R rows of T tokens; position t predicts token t + 1. Packed, R is 1 and ``cu_seqlens``
holds the boundaries of the samples (Megatron's ``thd``). Padded, a row is a sample, and causal attention never reads
the padding, so no mask is needed. Losses get B samples of W label positions in both cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from megatron_tlt.actor.context import context_positions
from megatron_tlt.algorithms.losses import LossInputs
from megatron_tlt.data.packing import balance, plan_micro_batches, plan_packs, sequence_cost, split_to_count
from megatron_tlt.data.rollout_batch import RolloutBatch


@dataclass(frozen=True)
class MicroBatch:
    """Inputs of one forward pass: tokens and labels for the model, loss columns of the samples in ``indices``."""

    indices: tuple[int, ...]
    tokens_RT: torch.Tensor
    labels_RT: torch.Tensor
    positions_RT: torch.Tensor
    cu_seqlens: tuple[int, ...]
    """Boundaries of the sequences in a row, starting with 0; padded, a row is one sequence."""
    loss_inputs: LossInputs
    response_spans: tuple[tuple[int, int], ...]
    gather_BW: torch.Tensor | None
    """Packed: index in the row of each label position of a sample; 0 after its end, where the loss mask is 0."""
    routes_RTF: torch.Tensor | None = None
    """The engine's experts for each token, of which all bytes are 255 where there are none (padding); uint8."""

    @property
    def packed(self) -> bool:
        return self.gather_BW is not None

    def by_sample(self, values_RT: torch.Tensor) -> torch.Tensor:
        """Rearranges one value per token of the rows to (B, W)."""
        # a micro-batch without samples still has a row, so that the forward pass runs
        return values_RT[: len(self.indices)] if self.gather_BW is None else values_RT[0][self.gather_BW]

    def on_context_rank(self, rank: int, size: int) -> MicroBatch:
        """The micro-batch with only the tokens and labels that a context-parallel rank holds, (R, T/size)."""
        if size == 1:
            return self
        index = torch.tensor(context_positions(self.cu_seqlens, rank, size), device=self.tokens_RT.device)
        rows = (self.tokens_RT, self.labels_RT, self.positions_RT)
        tokens, labels, positions = (tensor[:, index].contiguous() for tensor in rows)
        routes = None if self.routes_RTF is None else self.routes_RTF[:, index]
        return replace(self, tokens_RT=tokens, labels_RT=labels, positions_RT=positions, routes_RTF=routes)

    def response_values(self, values_BW: torch.Tensor) -> torch.Tensor:
        """The entries of ``values_BW`` that belong to response tokens, concatenated over samples, (G) float32."""
        rows = [values_BW[i, start:stop] for i, (start, stop) in enumerate(self.response_spans)]
        return torch.cat([values_BW.new_empty(0), *rows]).float()


def _columns(batch: RolloutBatch, indices: Sequence[int], width: int, device: torch.device) -> LossInputs:
    shape = (len(indices), width)
    mask = torch.zeros(shape)
    advantages = torch.zeros(shape)
    old = torch.zeros(shape)
    reference = torch.zeros(shape)
    weights = torch.ones(shape)
    targets = {
        "loss_mask_G": mask,
        "old_log_probs_G": old,
        "reference_log_probs_G": reference,
        "token_weights_G": weights,
    }
    filled = {name: target for name, target in targets.items() if name in batch.columns}
    for i, (sample, (start, stop)) in enumerate(zip(indices, _spans(batch, indices), strict=True)):
        mask[i, start:stop] = 1.0
        advantages[i, start:stop] = batch.advantages_N[sample]
        for name, target in filled.items():
            target[i, start:stop] = batch.response(name, sample)
    return LossInputs(*(t.to(device) for t in (mask, advantages, old, reference, weights)))


def _spans(batch: RolloutBatch, indices: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Start and end of each sample's response among its label positions."""
    return tuple((batch.prompt_lengths[i] - 1, batch.lengths[i] - 1) for i in indices)


def _no_routes(batch: RolloutBatch, rows: int, width: int) -> torch.Tensor | None:
    if batch.routes_SF is None:
        return None
    return torch.full((rows, width, batch.routes_SF.shape[1]), 255, dtype=torch.uint8)


def collate(batch: RolloutBatch, indices: Sequence[int], pad_to_multiple: int, device: torch.device) -> MicroBatch:
    """Pads the samples ``indices`` to one length, a multiple of ``pad_to_multiple``."""
    longest = max((batch.lengths[i] for i in indices), default=1)
    width = -(-longest // pad_to_multiple) * pad_to_multiple
    rows = max(1, len(indices))
    tokens = torch.zeros((rows, width + 1), dtype=torch.int64)
    routes = _no_routes(batch, rows, width)
    for row, i in enumerate(indices):
        tokens[row, : batch.lengths[i]] = batch.tokens(i)
        if routes is not None:
            routes[row, : batch.lengths[i] - 1] = batch.routes(i)[:-1]
    tokens = tokens.to(device)
    return MicroBatch(
        indices=tuple(indices),
        tokens_RT=tokens[:, :-1].contiguous(),
        labels_RT=tokens[:, 1:].contiguous(),
        positions_RT=torch.arange(width, device=device).expand(rows, width),
        cu_seqlens=(0, width),
        loss_inputs=_columns(batch, indices, width, device),
        response_spans=_spans(batch, indices),
        gather_BW=None,
        routes_RTF=None if routes is None else routes.to(device),
    )


def pack(
    batch: RolloutBatch,
    indices: Sequence[int],
    pad_to_multiple: int,
    device: torch.device,
    pad_each_to: int = 1,
) -> MicroBatch:
    """Concatenates the samples ``indices`` into one row, whose length is a multiple of ``pad_to_multiple``.

    A sample's last token has no label and is left out. Each sequence is padded to a multiple of ``pad_each_to``; the
    padding at the end of the row is a separate sequence.
    """
    lengths = [batch.lengths[i] - 1 for i in indices]
    spans = [-(-length // pad_each_to) * pad_each_to for length in lengths]
    filler = -sum(spans) % pad_to_multiple or (0 if spans else pad_to_multiple)
    ends = torch.tensor([0, *spans, *([filler] if filler else [])]).cumsum(0).tolist()
    row = torch.zeros((2, ends[-1]), dtype=torch.int64)
    gather = torch.zeros((len(indices), max(lengths, default=0)), dtype=torch.int64)
    routes = _no_routes(batch, 1, ends[-1])
    for at, (sample, length) in enumerate(zip(indices, lengths, strict=True)):
        tokens, start = batch.tokens(sample), ends[at]
        row[0, start : start + length], row[1, start : start + length] = tokens[:-1], tokens[1:]
        gather[at, :length] = torch.arange(start, start + length)
        if routes is not None:
            routes[0, start : start + length] = batch.routes(sample)[:-1]
    positions = torch.cat([torch.arange(stop - start) for start, stop in pairwise(ends)])
    return MicroBatch(
        indices=tuple(indices),
        tokens_RT=row[:1].to(device),
        labels_RT=row[1:].to(device),
        positions_RT=positions[None].to(device),
        cu_seqlens=tuple(ends),
        loss_inputs=_columns(batch, indices, gather.shape[1], device),
        response_spans=_spans(batch, indices),
        gather_BW=gather.to(device),
        routes_RTF=None if routes is None else routes.to(device),
    )


@dataclass(frozen=True)
class BatchShape:
    """Constraints on micro-batches.

    ``max_tokens`` bounds their tokens, without the padding of single sequences; ``attention_share`` is the argument of
    ``data.packing.sequence_cost``. Their number is a multiple of ``count_multiple_of``. With ``equal_counts`` it is the
    same on every data-parallel rank: under expert parallelism, a forward pass of one rank needs all of them. Sequence
    parallelism and context parallelism split a row into parts of equal length.
    """

    max_tokens: int
    packed: bool = True
    attention_share: float = 0.0
    count_multiple_of: int = 1
    equal_counts: bool = False
    sequence_parallel_size: int = 1
    context_parallel_size: int = 1


def plan_shares(
    lengths: Sequence[int], shape: BatchShape, ranks: int, speeds: Sequence[float] | None = None
) -> list[list[list[int]]]:
    """The micro-batches of each data-parallel rank, as lists of indices into ``lengths``: at least one, maybe empty.

    ``speeds``: of each of the ranks, relative to each other; None: equal.

    Raises:
        ConfigError: a sequence is longer than ``shape.max_tokens``.
    """
    costs = [sequence_cost(length, shape.attention_share) for length in lengths]
    shares = []
    for share in balance(costs, ranks, speeds):
        own, own_costs = [lengths[i] for i in share], [costs[i] for i in share]
        plan = (
            plan_packs(own, own_costs, shape.max_tokens) if shape.packed else plan_micro_batches(own, shape.max_tokens)
        )
        shares.append([[share[i] for i in group] for group in plan])
    most = max(len(groups) for groups in shares)
    counts = [most if shape.equal_counts else len(groups) for groups in shares]
    rounded = [-(-max(1, count) // shape.count_multiple_of) * shape.count_multiple_of for count in counts]
    return [split_to_count(groups, costs, count) for groups, count in zip(shares, rounded, strict=True)]


class MicroBatches:
    """A rank's micro-batches, built lazily so that only those in flight take memory.

    Args:
        groups: sample indices of each micro-batch.
        form: builds a micro-batch from its sample indices.
    """

    def __init__(self, groups: Sequence[Sequence[int]], form: Callable[[Sequence[int]], MicroBatch]) -> None:
        self.groups = groups
        self._form = form

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, number: int) -> MicroBatch:
        return self._form(self.groups[number])

    def __iter__(self) -> Iterator[MicroBatch]:
        return map(self._form, self.groups)


def form_micro_batches(
    batch: RolloutBatch, groups: Sequence[Sequence[int]], shape: BatchShape, device: torch.device
) -> MicroBatches:
    """Builds a micro-batch of complete rows for each group of samples; ``batch`` must hold the samples."""
    context = 2 * shape.context_parallel_size if shape.context_parallel_size > 1 else 1
    multiple = context * shape.sequence_parallel_size
    if shape.packed:
        return MicroBatches(groups, lambda group: pack(batch, group, multiple, device, pad_each_to=context))
    return MicroBatches(groups, lambda group: collate(batch, group, multiple, device))

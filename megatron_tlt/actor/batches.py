"""Samples as tensors, in micro-batches bounded by tokens: packed one behind another, or padded to one length.

Shapes: R rows of T tokens go through the model; position t predicts the token behind it. Packed, R is 1 and
``cu_seqlens`` says where a sample begins and ends (Megatron's ``thd``); padded, a row is a sample and causal attention
never looks at the padding, so no mask is needed. Losses see B samples of W label positions in both cases.
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

    def response_values(self, values_BW: torch.Tensor) -> torch.Tensor:
        """The entries of ``values_BW`` that belong to response tokens, one sample's behind another's, (G) float32."""
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
    """The label positions of each sample's response."""
    return tuple((batch.prompt_lengths[i] - 1, batch.lengths[i] - 1) for i in indices)


def collate(batch: RolloutBatch, indices: Sequence[int], pad_to_multiple: int, device: torch.device) -> MicroBatch:
    """Pads the samples ``indices`` to one length, a multiple of ``pad_to_multiple``."""
    longest = max((batch.lengths[i] for i in indices), default=1)
    width = -(-longest // pad_to_multiple) * pad_to_multiple
    rows = max(1, len(indices))
    tokens = torch.zeros((rows, width + 1), dtype=torch.int64)
    for row, i in enumerate(indices):
        tokens[row, : batch.lengths[i]] = batch.tokens(i)
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
    )


def pack(
    batch: RolloutBatch,
    indices: Sequence[int],
    pad_to_multiple: int,
    device: torch.device,
    pad_each_to: int = 1,
) -> MicroBatch:
    """Lays the samples ``indices`` one behind another in one row, a multiple of ``pad_to_multiple`` long.

    A sample's last token predicts nothing and is left out. Each sequence is padded to a multiple of ``pad_each_to``;
    what fills up the row is a sequence of its own.
    """
    lengths = [batch.lengths[i] - 1 for i in indices]
    spans = [-(-length // pad_each_to) * pad_each_to for length in lengths]
    filler = -sum(spans) % pad_to_multiple or (0 if spans else pad_to_multiple)
    ends = torch.tensor([0, *spans, *([filler] if filler else [])]).cumsum(0).tolist()
    row = torch.zeros((2, ends[-1]), dtype=torch.int64)
    gather = torch.zeros((len(indices), max(lengths, default=0)), dtype=torch.int64)
    for at, (sample, length) in enumerate(zip(indices, lengths, strict=True)):
        tokens, start = batch.tokens(sample), ends[at]
        row[0, start : start + length], row[1, start : start + length] = tokens[:-1], tokens[1:]
        gather[at, :length] = torch.arange(start, start + length)
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


class MicroBatches:
    """A rank's micro-batches, each formed when it is asked for: only those in flight take memory.

    Args:
        groups: the samples of each.
        form: makes the tensors of one.
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
    """The samples of each group as tensors, whole rows; ``batch`` holds them."""
    context = 2 * shape.context_parallel_size if shape.context_parallel_size > 1 else 1
    multiple = context * shape.sequence_parallel_size
    if shape.packed:
        return MicroBatches(groups, lambda group: pack(batch, group, multiple, device, pad_each_to=context))
    return MicroBatches(groups, lambda group: collate(batch, group, multiple, device))

"""Collects the hidden states of a forward pass: all states of a sample are sent to one rank.

Each tensor-, pipeline- and context-parallel rank of a data-parallel rank records some positions at some layers. Each
sample of the data-parallel rank is assigned to one of these ranks, its owner; the states are sent point to point, one
micro-batch at a time. Shapes: S positions that a rank keeps of each of R rows, N of them of one sample, k columns (the
layers, then the output of the final norm) of H features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_tlt.actor.batches import MicroBatch, MicroBatches
from megatron_tlt.actor.context import context_positions
from megatron_tlt.data.packing import balance
from megatron_tlt.errors import RunError
from megatron_tlt.platform.device import current_device
from megatron_tlt.platform.host_copies import HostCopies

AuxHiddenStates = dict[int, list[torch.Tensor | None]]
"""Column -> this rank's states of each micro-batch, (S, R, H) on the host."""


@dataclass(frozen=True)
class Holder:
    """A rank of the world, its indices in the parallel dimensions, and the columns that it records."""

    data: int
    context: int
    tensor: int
    rank: int
    columns: list[int]


class _Piece(NamedTuple):
    """A holder's part of one sample: positions ``kept_N`` of row ``row`` are the sample's tokens ``tokens_N``."""

    sample: int
    row: int
    kept_N: torch.Tensor
    tokens_N: torch.Tensor


def part_of(count: int, rank: int, size: int) -> slice:
    """The slice of ``count`` consecutive positions that a tensor-parallel rank keeps, as equal as possible."""
    return slice(rank * count // size, (rank + 1) * count // size)


def assign_owners(samples: Sequence[int], lengths: Sequence[int], ranks: int) -> dict[int, int]:
    """Assigns the states of ``samples`` to ``ranks`` ranks, balanced by tokens; sample index -> owner."""
    shares = balance([lengths[sample] - 1 for sample in samples], ranks)
    return {samples[i]: owner for owner, share in enumerate(shares) for i in share}


def _kept_positions(batch: MicroBatch, holder: Holder, context_size: int, tensor_size: int) -> torch.Tensor:
    """The positions of a micro-batch's rows that ``holder`` kept, (S)."""
    if context_size == 1:
        seen = torch.arange(batch.tokens_RT.shape[1])
    else:
        seen = torch.tensor(context_positions(batch.cu_seqlens, holder.context, context_size))
    return seen[part_of(len(seen), holder.tensor, tensor_size)]


class StateExchange:
    """Collects the states of one forward pass.

    Args:
        batches: of this data-parallel rank.
        lengths: numbers of tokens of all samples.
        aux_states: the states that this rank recorded; emptied during the exchange.
        holders: the ranks that processed ``batches``, including this one.
        num_columns: k.
        hidden_size: H.
        dtype: of the states.

    Raises:
        RunError: a column was not recorded for every micro-batch.
    """

    def __init__(
        self,
        batches: MicroBatches,
        lengths: Sequence[int],
        aux_states: AuxHiddenStates,
        holders: Sequence[Holder],
        *,
        num_columns: int,
        hidden_size: int,
        dtype: torch.dtype,
    ) -> None:
        for column, calls in aux_states.items():
            if len(calls) != len(batches):
                raise RunError(f"column {column} saw {len(calls)} micro-batches; allowed: each of {len(batches)} once")
        self._batches, self._aux_states, self._holders = batches, aux_states, holders
        self._features, self._hidden_size, self._dtype = num_columns * hidden_size, hidden_size, dtype
        self._sizes = (1 + max(holder.context for holder in holders), 1 + max(holder.tensor for holder in holders))
        samples = sorted(sample for group in batches.groups for sample in group)
        self._owners = assign_owners(samples, lengths, len(holders))
        self._own = [holder.rank for holder in holders].index(dist.get_rank())
        self._device = current_device().torch_device
        self._copies = HostCopies()
        self._whole: dict[int, torch.Tensor] = {}

    def run(self) -> dict[int, torch.Tensor]:
        """The states of the samples that this rank owns, by index, (T, k * H) each; a collective of all holders."""
        for number, batch in enumerate(self._batches):
            for sample, (_, stop) in zip(batch.indices, batch.response_spans, strict=True):
                if self._owners[sample] == self._own:
                    self._whole[sample] = torch.zeros(stop + 1, self._features, dtype=self._dtype)
            self._exchange(number, batch)
            for calls in self._aux_states.values():
                calls[number] = None
        return self._whole

    def _exchange(self, number: int, batch: MicroBatch) -> None:
        """Exchanges one micro-batch: one message per pair of sender and receiver."""
        kept = [_kept_positions(batch, holder, *self._sizes) for holder in self._holders]
        operations, arriving = [], []
        for at, holder in enumerate(self._holders):
            if at == self._own:
                continue
            if outgoing := self._pieces(batch, self._own, kept[self._own], owner=at):
                data = self._sent(self._packed(number, outgoing))
                operations.append(dist.P2POp(dist.isend, data, holder.rank))
            if incoming := self._pieces(batch, at, kept[at], owner=self._own):
                rows = sum(len(piece.kept_N) for piece in incoming) * len(holder.columns)
                data = torch.empty(rows, self._hidden_size, dtype=self._dtype, device=self._device)
                operations.append(dist.P2POp(dist.irecv, data, holder.rank))
                arriving.append((holder, incoming, data))
        works = dist.batch_isend_irecv(operations) if operations else []
        if staying := self._pieces(batch, self._own, kept[self._own], owner=self._own):
            self._unpack(self._holders[self._own], staying, self._packed(number, staying))
        for work in works:
            work.wait()
        received = [self._copies.copy(data, self._dtype) for _, _, data in arriving]
        self._copies.wait()
        for (holder, incoming, _), data in zip(arriving, received, strict=True):
            self._unpack(holder, incoming, data)

    def _sent(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows on the device; copied from pinned memory, for which the host does not wait."""
        return (rows.pin_memory() if self._device.type == "cuda" else rows).to(self._device, non_blocking=True)

    def _pieces(self, batch: MicroBatch, at: int, kept_S: torch.Tensor, owner: int) -> list[_Piece]:
        """The pieces that holder ``at`` sends to holder ``owner``."""
        pieces = []
        for i, (sample, (_, stop)) in enumerate(zip(batch.indices, batch.response_spans, strict=True)):
            if self._owners[sample] == owner and self._holders[at].columns:
                tokens = kept_S - (batch.cu_seqlens[i] if batch.packed else 0)
                inside = ((tokens >= 0) & (tokens < stop)).nonzero()[:, 0]
                if len(inside):
                    pieces.append(_Piece(sample, 0 if batch.packed else i, inside, tokens[inside]))
        return pieces

    def _packed(self, number: int, pieces: Sequence[_Piece]) -> torch.Tensor:
        """This rank's pieces as one tensor, column by column within each piece, (sum of N * columns, H)."""
        columns = self._holders[self._own].columns
        rows = []
        for piece in pieces:
            for column in columns:
                states_SRH = self._aux_states[column][number]
                assert states_SRH is not None
                rows.append(states_SRH[piece.kept_N, piece.row])
        return torch.cat(rows)

    def _unpack(self, holder: Holder, pieces: Sequence[_Piece], data: torch.Tensor) -> None:
        """Writes the tensor that ``_packed`` returned on ``holder`` into the samples' states."""
        start = 0
        for piece in pieces:
            for column in holder.columns:
                rows = data[start : start + len(piece.tokens_N)]
                features = slice(column * self._hidden_size, (column + 1) * self._hidden_size)
                self._whole[piece.sample][piece.tokens_N, features] = rows
                start += len(rows)

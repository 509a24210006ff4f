"""Every engine rank receives the slices it lacks from the ranks that hold them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch

from megatron_tlt.errors import RunError
from megatron_tlt.platform.collectives import all_gather_data, failing_together
from megatron_tlt.platform.device import current_device, node_index, rank
from megatron_tlt.reshard.buckets import Bucket, ExchangeRound, aligned, local_transfers, make_rounds, staging_bytes_of
from megatron_tlt.reshard.checksum import CHECKSUM_WORDS, checksum
from megatron_tlt.reshard.checksum_verifier import ChecksumVerifier
from megatron_tlt.reshard.exchange import BucketExchange
from megatron_tlt.reshard.interface import Part, SpanSource, SyncReport, TensorSlice, WeightSync, WeightTarget
from megatron_tlt.reshard.plan import ReshardPlan, Transfer, make_plan
from megatron_tlt.reshard.spans import ShardMap, Span, TensorForm

_CHECKSUM_BYTES = CHECKSUM_WORDS * 8
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
TRAILER_BYTES = aligned(_CHECKSUM_BYTES)


@dataclass(frozen=True)
class WholeTensors:
    """The tensors that are moved, in order: their shapes and the dimension along which ranks shard each."""

    shapes: Mapping[str, tuple[int, ...]]
    cut_dims: Mapping[str, int]


class _Entry(NamedTuple):
    """One span of a rank, its dtype, and whether it is contiguous."""

    tensor: str
    start: int
    length: int
    dtype: str
    contiguous: bool


@dataclass(frozen=True)
class _Description:
    """A rank's description for the others: its node and its spans."""

    node: int
    held: list[_Entry]
    needed: list[_Entry]


@dataclass(frozen=True)
class _Views:
    """Spans with their memory."""

    spans: tuple[Span, ...]
    tensors: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, pairs: Iterable[tuple[Span, torch.Tensor]]) -> _Views:
        rows = list(pairs)
        return cls(tuple(span for span, _ in rows), tuple(tensor for _, tensor in rows))

    def described(self) -> list[_Entry]:
        return [
            _Entry(
                span.tensor,
                span.start,
                span.length,
                str(tensor.dtype).removeprefix("torch."),
                tensor.is_contiguous(),
            )
            for span, tensor in zip(self.spans, self.tensors, strict=True)
        ]

    def slice(self, slot: int, transfer: Transfer, dim: int) -> torch.Tensor:
        return self.tensors[slot].narrow(dim, transfer.start - self.spans[slot].start, transfer.length)


@dataclass(frozen=True)
class _Prepared:
    """Data that stays the same from one synchronization to the next."""

    plan: ReshardPlan
    held: tuple[Span, ...]
    needed: tuple[Span, ...]
    wire: dict[str, torch.dtype]
    rounds: list[ExchangeRound]
    local: list[Transfer]


class DirectSync(WeightSync):
    """Plans once, at the first synchronization; every synchronization moves only the slices that each rank lacks.

    Args:
        source: the weights that this rank of the actor holds.
        target: this rank's engine.
        whole: the tensors.
        source_layout, engine_layout: descriptions for errors (``actor TP2xPP2``, ``TP2 x 4``).
        staging_bytes: limit for the buckets in flight on this rank.
        part: the part of the engine that is replaced.
        exchange: transport of the rounds.
    """

    def __init__(
        self,
        source: SpanSource,
        target: WeightTarget,
        whole: WholeTensors,
        *,
        source_layout: str,
        engine_layout: str,
        staging_bytes: int,
        part: Part = "policy",
        exchange: type[BucketExchange] = BucketExchange,
    ) -> None:
        self._source = source
        self._target = target
        self._whole = whole
        self._layouts = source_layout, engine_layout
        self._staging_bytes = staging_bytes
        self._part: Part = part
        self._exchange = exchange
        self._prepared: _Prepared | None = None

    @property
    def plan(self) -> ReshardPlan | None:
        """The plan of transfers; None before the first synchronization."""
        return self._prepared.plan if self._prepared else None

    def sync(self, *, version: int, verify: bool) -> SyncReport:
        began = time.perf_counter()
        held = _Views.of(self._source())
        with failing_together():
            needed = _Views.of(self._needs())
            self._check_unchanged(held, needed)
        prepared = self._prepared = self._prepared or self._prepare(held, needed)
        self._target.begin_update(self._part)
        trailer = TRAILER_BYTES if verify else 0
        with torch.no_grad():
            mover = _Packer(prepared, held, needed, verify)
            exchange = self._exchange(prepared.rounds, trailer, current_device().torch_device)
            exchange.run(mover, [partial(mover.copy, transfer) for transfer in prepared.local])
            with failing_together():
                verified = mover.proof.check()
        self._target.finish_update(self._part, version)
        plan, mine = prepared.plan, rank()
        return SyncReport(
            tensors=len({span.tensor for span in prepared.needed}),
            verified_tensors=verified,
            seconds=time.perf_counter() - began,
            version=version,
            sent_bytes=_bucket_bytes((one.sends.values() for one in prepared.rounds), trailer),
            received_bytes=_bucket_bytes((one.receives.values() for one in prepared.rounds), trailer),
            copied_bytes=plan.local_bytes[mine],
            lower_bound_bytes=plan.lower_bound,
            staging_bytes=staging_bytes_of(prepared.rounds, trailer),
        )

    def _needs(self) -> Iterator[tuple[Span, torch.Tensor]]:
        """The parts of each tensor that this engine rank needs, with views of their destinations."""
        target = self._target
        for name, view, part in target.read_weights() if self._part == "policy" else target.read_drafter_weights():
            if name not in self._whole.shapes:
                raise RunError(f"rank {rank()}: the engine needs {name}, which its source lacks ({self._where})")
            yield self._span(name, view, part), view

    def _span(self, name: str, view: torch.Tensor, part: TensorSlice | None) -> Span:
        shape, dim = self._whole.shapes[name], self._whole.cut_dims[name]
        if part is None:
            span = Span(name, 0, shape[dim])
        elif part.dim == dim:
            span = Span(name, part.start, part.length)
        elif (part.start, part.length) == (0, shape[part.dim]):
            span = Span(name, 0, shape[dim])
        else:
            cuts = f"along dimension {part.dim}, the actor along {dim}"
            raise RunError(f"rank {rank()}: the engine cuts {name} {cuts} ({self._where})")
        expected = (*shape[:dim], span.length, *shape[dim + 1 :])
        if tuple(view.shape) != expected:
            shapes = f"{tuple(view.shape)}, the actor's slice {expected}"
            raise RunError(f"rank {rank()}: the engine's {name} is {shapes} ({self._where})")
        return span

    @property
    def _where(self) -> str:
        return "{} to engines {}".format(*self._layouts)

    def _check_unchanged(self, held: _Views, needed: _Views) -> None:
        before = self._prepared
        if before is not None and (before.held, before.needed) != (held.spans, needed.spans):
            raise RunError(f"rank {rank()}: the layout of the weights changed between synchronizations ({self._where})")

    def _prepare(self, held: _Views, needed: _Views) -> _Prepared:
        """Plans from the descriptions of all ranks; an error is the same on all of them."""
        mine = _Description(node_index(), held.described(), needed.described())
        ranks = all_gather_data(mine, _Description)
        actor = _dtypes((row.held for row in ranks), "actor")
        engines = _dtypes((row.needed for row in ranks), "engines")
        if unneeded := [name for name in self._whole.shapes if name not in engines]:
            raise RunError(f"{unneeded[0]}: no engine has a place for it ({self._where})")
        wire = {name: _wire_dtype(name, actor.get(name, engines[name]), engines[name]) for name in engines}
        forms = {
            name: TensorForm(tuple(shape), self._whole.cut_dims[name], wire[name].itemsize)
            for name, shape in self._whole.shapes.items()
        }
        actor_side = _side(self._layouts[0], [row.held for row in ranks])
        engine_side = _side(self._layouts[1], [row.needed for row in ranks])
        plan = make_plan(forms, actor_side, engine_side, [row.node for row in ranks])
        scattered = {entry.tensor for row in ranks for entry in (*row.held, *row.needed) if not entry.contiguous}
        contiguous = {
            name
            for name in engines
            if self._whole.cut_dims[name] == 0 and name not in scattered and actor.get(name) == engines[name]
        }
        rounds = make_rounds(plan, rank(), self._staging_bytes, TRAILER_BYTES, contiguous)
        return _Prepared(plan, held.spans, needed.spans, wire, rounds, local_transfers(plan, rank()))


def _side(layout: str, ranks: Iterable[Sequence[_Entry]]) -> ShardMap:
    return ShardMap(layout, tuple(tuple(Span(*entry[:3]) for entry in entries) for entries in ranks))


def _dtypes(ranks: Iterable[Sequence[_Entry]], side: str) -> dict[str, torch.dtype]:
    """The single dtype of each tensor on a side."""
    found: dict[str, str] = {}
    for entry in chain.from_iterable(ranks):
        name = entry.tensor
        if found.setdefault(name, entry.dtype) != entry.dtype:
            raise RunError(f"{name}: the {side} keep it as {found[name]} on one rank and as {entry.dtype} on another")
    return {name: getattr(torch, dtype) for name, dtype in found.items()}


def _wire_dtype(tensor: str, actor: torch.dtype, engine: torch.dtype) -> torch.dtype:
    """What a tensor travels as: the narrower of the two, so that it is rounded (once) where it comes from."""
    if engine not in (actor, *_FLOATS):
        raise RunError(
            f"{tensor}: the engine keeps it as {engine}, the actor as {actor}; allowed: the actor's, {_FLOATS}"
        )
    return engine if engine.itemsize <= actor.itemsize else actor


def _bucket_bytes(rounds: Iterable[Iterable[Bucket]], trailer: int) -> int:
    return sum(bucket.wire_bytes(trailer) for bucket in chain.from_iterable(rounds))


class _Packer:
    """Moves slices between views and buckets, and records them."""

    def __init__(self, prepared: _Prepared, held: _Views, needed: _Views, verify: bool) -> None:
        self._forms = prepared.plan.forms
        self._wire = prepared.wire
        self._held = held
        self._needed = needed
        self._verify = verify
        self._sent_sums: dict[tuple[int, int, int], torch.Tensor] = {}
        self.proof = ChecksumVerifier(prepared.plan, rank(), prepared.needed)

    def _source(self, transfer: Transfer) -> torch.Tensor:
        return self._held.slice(transfer.source_slot, transfer, self._forms[transfer.tensor].dim)

    def _target(self, transfer: Transfer) -> torch.Tensor:
        return self._needed.slice(transfer.target_slot, transfer, self._forms[transfer.tensor].dim)

    def copy(self, transfer: Transfer) -> None:
        """Copies from the actor to the engine of this process, without a buffer."""
        source, target = self._source(transfer), self._target(transfer)
        target.copy_(source)
        self.proof.written(transfer)
        if self._verify:
            self.proof.compare(transfer, self._sent(transfer, source), self._found(transfer, target))

    def outgoing(self, bucket: Bucket) -> list[torch.Tensor]:
        return [self._source(fragment.transfer) for fragment in bucket.in_place]

    def incoming(self, bucket: Bucket) -> list[torch.Tensor]:
        return [self._target(fragment.transfer) for fragment in bucket.in_place]

    def pack(self, bucket: Bucket, data: torch.Tensor) -> None:
        for transfer, offset, size in bucket.packed:
            source = self._source(transfer)
            self._seen(data, offset, size, transfer, source.shape).copy_(source)
        if self._verify:
            for place, fragment in enumerate(bucket.fragments):
                sent = self._sent(fragment.transfer, self._source(fragment.transfer))
                self._trailer(bucket, data, place).copy_(sent)

    def unpack(self, bucket: Bucket, data: torch.Tensor) -> None:
        for transfer, offset, size in bucket.packed:
            target = self._target(transfer)
            target.copy_(self._seen(data, offset, size, transfer, target.shape))
        for place, fragment in enumerate(bucket.fragments):
            transfer = fragment.transfer
            self.proof.written(transfer)
            if self._verify:
                sent = self._trailer(bucket, data, place).clone()  # the buffer is reused
                self.proof.compare(transfer, sent, self._found(transfer, self._target(transfer)))

    def _seen(self, data: torch.Tensor, offset: int, size: int, transfer: Transfer, shape: torch.Size) -> torch.Tensor:
        """Views a fragment of a bucket's bytes as its slice."""
        return data[offset : offset + size].view(self._wire[transfer.tensor]).view(shape)

    @staticmethod
    def _trailer(bucket: Bucket, data: torch.Tensor, place: int) -> torch.Tensor:
        at = bucket.payload_bytes + place * TRAILER_BYTES
        return data[at : at + _CHECKSUM_BYTES].view(torch.int64)

    def _sent(self, transfer: Transfer, source: torch.Tensor) -> torch.Tensor:
        """The checksum of a slice in the form in which it is sent; computed once for all receivers."""
        key = (transfer.source_slot, transfer.start, transfer.length)
        if key not in self._sent_sums:
            self._sent_sums[key] = checksum(source.to(self._wire[transfer.tensor]))
        return self._sent_sums[key]

    def _found(self, transfer: Transfer, target: torch.Tensor) -> torch.Tensor:
        """The checksum of a slice in the engine, in the form in which it was sent."""
        return checksum(target.to(self._wire[transfer.tensor]))

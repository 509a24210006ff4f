"""Every engine rank receives the slices it lacks from the ranks that hold them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch

from megatron_tlt.errors import RunError
from megatron_tlt.platform.collectives import all_gather_data, failing_together
from megatron_tlt.platform.device import current_device, node_index, rank
from megatron_tlt.reshard.buckets import Bucket, ExchangeRound, local_transfers, make_rounds, staging_bytes_of
from megatron_tlt.reshard.exchange import BucketExchange
from megatron_tlt.reshard.interface import (
    HeldWeights,
    Part,
    SpanSource,
    SpanViews,
    SyncReport,
    TensorSlice,
    WeightSync,
    WeightTarget,
)
from megatron_tlt.reshard.packer import TRAILER_BYTES, Packer, local_groups
from megatron_tlt.reshard.plan import ReshardPlan, Transfer, make_plan
from megatron_tlt.reshard.spans import ShardMap, Span, tensor_forms

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class WholeTensors:
    """The tensors that are moved, in order: their shapes and the dimension along which ranks shard each."""

    shapes: Mapping[str, tuple[int, ...]]
    cut_dims: Mapping[str, int]


_Described = list[tuple[Span, str, bool]]
"""Spans, each with its dtype and whether it is contiguous."""


@dataclass(frozen=True)
class _Description:
    """A rank's description for the others: its node and its spans."""

    node: int
    held: _Described
    needed: _Described


@dataclass(frozen=True)
class _Prepared:
    """Data that stays the same from one synchronization to the next."""

    plan: ReshardPlan
    held: list[Span]
    needed: list[Span]
    wire: dict[str, torch.dtype]
    rounds: list[ExchangeRound]
    local: list[list[Transfer]]


class DirectSync(WeightSync):
    """Plans once, at the first synchronization; every synchronization moves only the slices that each rank lacks.

    The layouts are descriptions for errors (``actor TP2xPP2``, ``TP2 x 4``); ``staging_bytes`` limits the buckets in
    flight on this rank.
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
        self._packer: Packer | None = None
        self._weights: HeldWeights | None = None
        self._needed: SpanViews = []

    @property
    def plan(self) -> ReshardPlan | None:
        """The plan of transfers; None before the first synchronization."""
        return self._prepared.plan if self._prepared else None

    def sync(self, *, version: int, verify: bool) -> SyncReport:
        began = time.perf_counter()
        held = self._source()
        with failing_together():
            needed = self._needs()
            kept = self._packer if self._packer is not None and self._packer.shows(held, needed) else None
            if kept is None:
                self._check_unchanged(held, needed)
        prepared = self._prepared = self._prepared or self._prepare(held, needed)
        packer = self._packer = kept or Packer(prepared.plan, prepared.wire, held, needed)
        packer.begin(verify=verify)
        self._target.begin_update(self._part)
        trailer = TRAILER_BYTES if verify else 0
        with torch.no_grad():
            exchange = self._exchange(prepared.rounds, trailer, current_device().torch_device)
            exchange.run(packer, [partial(packer.copy, group) for group in prepared.local])
            with failing_together():
                verified = packer.proof.check()
        current_device().synchronize()  # unverified copies are only launched so far
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

    def _needs(self) -> SpanViews:
        """The parts of each tensor that this engine rank needs, with views of their destinations."""
        target = self._target
        weights = target.read_weights() if self._part == "policy" else target.read_drafter_weights()
        if weights is not self._weights:
            for name, _, _ in weights:
                if name not in self._whole.shapes:
                    raise RunError(f"rank {rank()}: the engine needs {name}, which its source lacks ({self._where})")
            self._needed = [(self._span(name, view, part), view) for name, view, part in weights]
            self._weights = weights
        return self._needed

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

    def _check_unchanged(self, held: SpanViews, needed: SpanViews) -> None:
        before = self._prepared
        if before is not None and (before.held, before.needed) != (_spans(held), _spans(needed)):
            raise RunError(f"rank {rank()}: the layout of the weights changed between synchronizations ({self._where})")

    def _prepare(self, held: SpanViews, needed: SpanViews) -> _Prepared:
        """Plans from the descriptions of all ranks; an error is the same on all of them."""
        mine = _Description(node_index(), _described(held), _described(needed))
        ranks = all_gather_data(mine, _Description)
        actor = _dtypes((row.held for row in ranks), "actor")
        engines = _dtypes((row.needed for row in ranks), "engines")
        if unneeded := [name for name in self._whole.shapes if name not in engines]:
            raise RunError(f"{unneeded[0]}: no engine has a place for it ({self._where})")
        wire = {name: _wire_dtype(name, actor.get(name, engines[name]), engines[name]) for name in engines}
        sides = zip(self._layouts, ([row.held for row in ranks], [row.needed for row in ranks]), strict=True)
        actor_side, engine_side = (
            ShardMap(layout, tuple(tuple(span for span, _, _ in spans) for spans in side)) for layout, side in sides
        )
        forms = tensor_forms(self._whole, {name: dtype.itemsize for name, dtype in wire.items()})
        plan = make_plan(forms, actor_side, engine_side, [row.node for row in ranks])
        scattered = {span.tensor for row in ranks for span, _, contiguous in row.held + row.needed if not contiguous}
        contiguous = {
            name
            for name in engines
            if self._whole.cut_dims[name] == 0 and name not in scattered and actor.get(name) == engines[name]
        }
        rounds = make_rounds(plan, rank(), self._staging_bytes, TRAILER_BYTES, contiguous)
        local = local_groups(local_transfers(plan, rank()), plan.bytes_of)
        return _Prepared(plan, _spans(held), _spans(needed), wire, rounds, local)


def _spans(views: SpanViews) -> list[Span]:
    return [span for span, _ in views]


def _described(views: SpanViews) -> _Described:
    return [(span, str(view.dtype).removeprefix("torch."), view.is_contiguous()) for span, view in views]


def _dtypes(ranks: Iterable[_Described], side: str) -> dict[str, torch.dtype]:
    """The single dtype of each tensor on a side."""
    found: dict[str, str] = {}
    for (name, *_), dtype, _ in chain.from_iterable(ranks):
        if found.setdefault(name, dtype) != dtype:
            raise RunError(f"{name}: the {side} keep it as {found[name]} on one rank and as {dtype} on another")
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

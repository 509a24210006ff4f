"""Checks parallel layouts against a model and a number of processes, and finds the nearest that fit; pure.

The rules are those of Megatron-Core 0.16: ``parallel_state.initialize_model_parallel``, ``__post_init__`` of
``ModelParallelConfig`` and ``TransformerConfig``, ``tensor_parallel.layers`` and ``transformer.moe``.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import inf, log2
from typing import Any

_TENSOR, _PIPELINE, _CONTEXT = (f"{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "context"))
_VIRTUAL = "virtual_pipeline_model_parallel_size"
_EXPERT, _EXPERT_TENSOR = "expert_model_parallel_size", "expert_tensor_parallel_size"
_FIRST, _LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
_COUNTED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
_BY_HAND = "pipeline_model_parallel_layout"
# Larger than any sum of ratios: dimensions that were not requested are suggested only if nothing else fits.
_NOT_REQUESTED = 1000.0
# The last bits of a sum of logarithms depend on the order of summation.
_ROUNDING = 1e-9


def positive(values: dict[str, Any], *keys: str) -> int | None:
    """The value of the first of ``keys`` that has a positive integer; None if none has."""
    found = (values.get(key) for key in keys)
    return next((n for n in found if isinstance(n, int) and not isinstance(n, bool) and n > 0), None)


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def listed_divisors(number: int) -> str:
    return ", ".join(map(str, divisors(number)))


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that a layout divides; a width is None if the model has no such part."""

    layers: int
    heads: int
    kv_groups: int
    head_dim: int
    ffn: int | None
    """Width of the dense feed-forward layers."""
    experts: int = 0
    moe_ffn: int | None = None
    """Width of one expert."""
    shared_ffn: int | None = None
    """Width of the shared expert, which is sharded like a dense layer."""
    where: str = "config.json"
    """The file or key that it was read from."""

    @classmethod
    def read(cls, model: dict[str, Any], where: str) -> ModelShape | None:
        """From the contents of a Hugging Face ``config.json``; None if it lacks a size that every model has."""
        layers, heads = positive(model, "num_hidden_layers"), positive(model, "num_attention_heads")
        hidden, width = positive(model, "hidden_size"), positive(model, "intermediate_size")
        if layers is None or heads is None or hidden is None or width is None:
            return None
        experts = positive(model, "num_local_experts", "num_experts") or 0
        dense = not experts or model.get("mlp_only_layers") or (positive(model, "decoder_sparse_step") or 1) > 1
        return cls(
            layers=layers,
            heads=heads,
            kv_groups=positive(model, "num_key_value_heads") or heads,
            head_dim=positive(model, "head_dim") or max(1, hidden // heads),
            ffn=width if dense else None,
            experts=experts,
            moe_ffn=positive(model, "moe_intermediate_size", "intermediate_size") if experts else None,
            shared_ffn=positive(model, "shared_expert_intermediate_size") if experts else None,
            where=where,
        )


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel dimensions of ``world`` processes; data parallelism is world / (TP x PP x CP)."""

    world: int
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    """Model chunks on each stage; None: not interleaved."""
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    """Tensor parallelism of the experts; None: ``tp``."""
    sp: bool = False
    first: int | None = None
    """Layers of the first stage, if configured."""
    last: int | None = None
    counts_embedding: bool = False
    """Whether the embedding counts as a layer of the first stage."""
    counts_loss: bool = False
    """Whether the loss counts as a layer of the last stage."""
    by_hand: bool = False
    """Whether ``pipeline_model_parallel_layout`` places every layer; Megatron itself checks it."""

    @classmethod
    def read(cls, megatron: dict[str, Any], world: int) -> Layout:
        """From ``actor.megatron``; invalid sizes are reported elsewhere and treated as the default here."""
        return cls(
            world,
            tp=positive(megatron, _TENSOR) or 1,
            pp=positive(megatron, _PIPELINE) or 1,
            vpp=positive(megatron, _VIRTUAL),
            cp=positive(megatron, _CONTEXT) or 1,
            ep=positive(megatron, _EXPERT) or 1,
            etp=positive(megatron, _EXPERT_TENSOR),
            sp=megatron.get("sequence_parallel") is True,
            first=positive(megatron, _FIRST),
            last=positive(megatron, _LAST),
            counts_embedding=megatron.get(_COUNTED[0]) is True,
            counts_loss=megatron.get(_COUNTED[1]) is True,
            by_hand=megatron.get(_BY_HAND) is not None,
        )

    @property
    def dp(self) -> int:
        return self.world // (self.tp * self.pp * self.cp)

    @property
    def extra(self) -> int:
        """Number of embedding and loss layers that are counted as layers."""
        return self.counts_embedding + self.counts_loss

    def __str__(self) -> str:
        sizes = {"TP": self.tp, "PP": self.pp, "VP": self.vpp or 1, "CP": self.cp, "EP": self.ep}
        parts = [f"{name}{size}" for name, size in sizes.items() if size > 1]
        if self.etp is not None:
            parts.append(f"ETP{self.etp}")
        if self.dp > 1 or not parts:
            parts.append(f"DP{self.dp}")
        return "x".join(parts) + ("+SP" if self.sp else "")


def wrong_values(megatron: dict[str, Any]) -> Iterator[str]:
    """One line per size in ``actor.megatron`` below 1, and one if several options set uneven stages."""
    for key in (_TENSOR, _PIPELINE, _VIRTUAL, _CONTEXT, _EXPERT, _EXPERT_TENSOR, _FIRST, _LAST):
        value = megatron.get(key)
        # A wrong type is reported by the pass-through check.
        if isinstance(value, int) and not isinstance(value, bool) and value < 1:
            yield f"actor.megatron.{key}: found {value}; allowed: at least 1"
    ways = ((_FIRST, _LAST), _COUNTED, (_BY_HAND,))
    found = [key for keys in ways for key in keys if megatron.get(key) not in (None, False)]
    if not any(set(found) <= set(keys) for keys in ways):
        yield f"actor.megatron: found {', '.join(found)}; allowed: {', or '.join(' and '.join(keys) for keys in ways)}"


def tensor_problems(key: str, size: int, shape: ModelShape) -> Iterator[str]:
    """Why a layer cannot be sharded over ``size`` ranks; the rules are the same for Megatron and vLLM."""
    if shape.heads % size:
        yield f"{key}: found {size}; allowed: a divisor of the model's {shape.heads} attention heads ({shape.where})"
    elif shape.kv_groups % size and size % shape.kv_groups:
        yield (
            f"{key}: found {size}; allowed: a divisor or multiple of the {shape.kv_groups} key-value heads "
            f"({shape.where})"
        )
    for name, width in (("intermediate_size", shape.ffn), ("shared_expert_intermediate_size", shape.shared_ffn)):
        if width and width % size:
            yield f"{key}: found {size}; allowed: a divisor of the model's {name}, {width} ({shape.where})"


def _world(layout: Layout) -> Iterator[str]:
    products = [("tensor x pipeline x context", (layout.tp, layout.pp, layout.cp))]
    if layout.ep > 1 or layout.etp is not None:
        products.append(("expert tensor x expert x pipeline", (layout.etp or layout.tp, layout.ep, layout.pp)))
    for names, (a, b, c) in products:
        if layout.world % (a * b * c):
            yield (
                f"actor.megatron: {names} parallel = {a} x {b} x {c} = {a * b * c} does not divide the {layout.world} "
                f"processes of launcher.nnodes x launcher.nproc_per_node; allowed: {listed_divisors(layout.world)}"
            )


def _interleaving(layout: Layout) -> Iterator[str]:
    if layout.vpp is not None and layout.pp == 1:
        yield f"actor.megatron.{_VIRTUAL}: found {layout.vpp}; allowed: null where {_PIPELINE} is 1"
    elif layout.vpp == 1:
        yield f"actor.megatron.{_VIRTUAL}: found 1; allowed: null or at least 2"


def _layers(layout: Layout, shape: ModelShape) -> Iterator[str]:
    chunks, given = layout.vpp or 1, [n for n in (layout.first, layout.last) if n is not None]
    # Except for a configured first or last stage, all stages and all their chunks have the same number of layers.
    stages, layers = layout.pp - len(given), shape.layers + layout.extra - sum(given)
    fits = layers == 0 if stages == 0 else min(stages, layers) > 0 and layers % (stages * chunks) == 0
    if layout.by_hand or (fits and not any(n % chunks for n in given)):
        return
    if given:
        ends = " and ".join(f"{key} {n}" for key, n in ((_FIRST, layout.first), (_LAST, layout.last)) if n is not None)
        yield (
            f"actor.megatron: found {ends}, which leaves {max(0, layers)} of the model's {shape.layers} layers for "
            f"{max(0, stages)} more stages; allowed: the same number for each of these, and on every stage a multiple "
            f"of its {chunks} chunks ({shape.where})"
        )
    else:
        counted = f"{shape.layers} layers" + (f" and the {layout.extra} counted with them" if layout.extra else "")
        yield (
            f"actor.megatron: pipeline x virtual pipeline parallel = {stages} x {chunks} = {stages * chunks}; "
            f"allowed: a divisor of the model's {counted}: {listed_divisors(layers)} ({shape.where})"
        )


def _tensor(layout: Layout, shape: ModelShape) -> Iterator[str]:
    key = f"actor.megatron.{_TENSOR}"
    found = list(tensor_problems(key, layout.tp, shape))
    yield from found
    # Megatron splits the three projections as one tensor, within a head if there are fewer key-value heads than ranks.
    projections = (shape.heads + 2 * shape.kv_groups) * shape.head_dim
    if not found and projections % layout.tp:
        yield (
            f"{key}: found {layout.tp}; allowed: a divisor of the width of the model's query, key and value "
            f"projections, {projections} ({shape.where})"
        )


def _experts(layout: Layout, shape: ModelShape) -> Iterator[str]:
    expert_tensor, where = layout.etp or layout.tp, shape.where
    if not shape.experts:
        if layout.ep > 1:
            yield f"actor.megatron.{_EXPERT}: found {layout.ep}; allowed: 1, as the model has no experts ({where})"
        if layout.etp is not None:
            yield (
                f"actor.megatron.{_EXPERT_TENSOR}: found {layout.etp}; allowed: null, as the model has no experts "
                f"({where})"
            )
        return
    if shape.experts % layout.ep:
        yield (
            f"actor.megatron.{_EXPERT}: found {layout.ep}; allowed: a divisor of the model's {shape.experts} experts: "
            f"{listed_divisors(shape.experts)} ({where})"
        )
    if shape.moe_ffn and shape.moe_ffn % expert_tensor:
        unset = f" ({_TENSOR}, as it is not set)" if layout.etp is None else ""
        yield (
            f"actor.megatron.{_EXPERT_TENSOR}: found {expert_tensor}{unset}; allowed: a divisor of the width of the "
            f"model's experts, {shape.moe_ffn} ({where})"
        )
    if layout.tp > 1 and not layout.sp:
        yield (
            f"actor.megatron.sequence_parallel: found false; allowed: true where a model with experts is trained at "
            f"{_TENSOR} {layout.tp} ({where})"
        )


def problems(layout: Layout, shape: ModelShape | None) -> list[str]:
    """Every reason why a layout does not fit, one line each; without a shape only rules of the layout are checked."""
    lines = [*_world(layout), *_interleaving(layout)]
    if layout.sp and layout.tp == 1:
        lines.append(f"actor.megatron.sequence_parallel: found true; allowed: false where {_TENSOR} is 1")
    if shape is not None:
        lines += [*_tensor(layout, shape), *_layers(layout, shape), *_experts(layout, shape)]
    return lines


def _ratio(asked: int, size: int) -> float:
    return abs(log2(size / asked))


def _added(asked: int, size: int) -> float:
    return _ratio(asked, size) + (_NOT_REQUESTED if asked == 1 < size else 0.0)


@dataclass(frozen=True)
class _Choices:
    """The valid sizes of each dimension, with their distance from the requested size; nearest first."""

    tps: list[tuple[float, int]]
    stages: list[tuple[float, int, int | None]]
    cps: list[tuple[float, int]]
    experts: list[tuple[float, int, int | None]]

    @classmethod
    def of(cls, layout: Layout, shape: ModelShape | None) -> _Choices:
        sizes, bare = divisors(layout.world), _bare(layout)
        follows = layout.etp is None or (shape is not None and not shape.experts)

        def fits(*rules: Callable[[Layout, ModelShape], Iterator[str]], **chosen: Any) -> bool:
            return shape is None or not any(True for rule in rules for _ in rule(replace(bare, **chosen), shape))

        def interleaved(pp: int) -> list[int | None]:
            if layout.by_hand:
                return [layout.vpp if pp > 1 and layout.vpp != 1 else None]
            most = (shape.layers + layout.extra) // pp if shape and pp > 1 else 1
            return [None, *range(2, most + 1)]

        def by_distance(entries: Iterator[Any]) -> list[Any]:
            return sorted(entries, key=lambda entry: entry[0])

        return cls(
            tps=by_distance(
                (_ratio(layout.tp, tp), tp)
                for tp in sizes
                if fits(_tensor, _experts, tp=tp, sp=True, etp=None if follows else 1)
            ),
            stages=by_distance(
                (_ratio(layout.pp, pp) + _added(layout.vpp or 1, vpp or 1), pp, vpp)
                for pp in ([layout.pp] if layout.by_hand else sizes)
                for vpp in interleaved(pp)
                if fits(_layers, pp=pp, vpp=vpp)
            ),
            cps=by_distance((_added(layout.cp, cp), cp) for cp in sizes),
            experts=by_distance(
                (_added(layout.ep, ep) + (_ratio(layout.etp, etp) if layout.etp and etp else 0.0), ep, etp)
                for ep in sizes
                for etp in ([None] if follows else sizes)
                if fits(_experts, ep=ep, etp=etp)
            ),
        )

    def nearest(self, layout: Layout, sequences: int, count: int) -> list[tuple[float, Layout]]:
        """The ``count`` nearest combinations that divide the world and give every data-parallel rank a sequence.

        Unsorted; includes all combinations as near as the last one, and possibly others.
        """
        world, bare, asked = layout.world, _bare(layout), layout.tp * layout.pp * layout.cp
        found: list[tuple[float, Layout]] = []
        nearest, bound = [-inf] * count, inf  # negated distances, so that the heap's first is the farthest
        for (a, tp), (b, pp, vpp), (c, cp) in product(self.tps, self.stages, self.cps):
            size = tp * pp * cp
            so_far = a + b + c + _ratio(asked, size)
            if so_far > bound or world % size or world // size > sequences:
                continue
            for d, ep, etp in self.experts:
                if so_far + d > bound:
                    break
                if world % (pp * ep * (etp or tp)) == 0:
                    found.append((so_far + d, replace(bare, tp=tp, pp=pp, vpp=vpp, cp=cp, ep=ep, etp=etp)))
                    heapq.heappushpop(nearest, -so_far - d)
                    bound = _ROUNDING - nearest[0]
        return found


def _bare(layout: Layout) -> Layout:
    return replace(layout, tp=1, pp=1, vpp=None, cp=1, ep=1, etp=None, sp=False)


def nearest(layout: Layout, shape: ModelShape | None, count: int, sequences: int | None = None) -> list[Layout]:
    """Up to ``count`` fitting layouts of the same number of processes, nearest first; includes ``layout`` if it fits.

    The distance is the sum of ``|log2(suggested / requested)|`` over TP, PP, VP, CP, EP, ETP and DP. Layouts that use
    VP, CP or EP although it was not requested come last. Ties are broken by the smallest change of TP x PP x EP, and so
    of memory per device, then by smaller sizes in the above order. ETP follows TP if it is not set; SP is kept if
    possible.

    Args:
        layout: the requested layout.
        shape: of the model; None skips its rules.
        count: maximum number of layouts.
        sequences: per optimizer step, if they limit data parallelism.
    """
    choices = _Choices.of(layout, shape)
    most = layout.world * layout.world if sequences is None else sequences
    found = choices.nearest(layout, most, count)
    memory = layout.tp * layout.pp * layout.ep

    def order(entry: tuple[float, Layout]) -> tuple[float, ...]:
        distance, one = entry
        change = round(_ratio(memory, one.tp * one.pp * one.ep), 9)
        return round(distance, 9), change, one.tp, one.pp, one.vpp or 1, one.cp, one.ep, one.etp or one.tp

    experts = shape is not None and shape.experts > 0
    return [
        replace(one, sp=one.tp > 1 and (layout.sp or experts)) for _, one in heapq.nsmallest(count, found, key=order)
    ]

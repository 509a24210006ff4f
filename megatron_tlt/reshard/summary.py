"""The figures of a plan as plain data, under stable keys; bytes and seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from math import prod
from typing import Any

from megatron_tlt.reshard.plan import ReshardPlan
from megatron_tlt.reshard.projection import Bandwidths, project

_NOTES = {
    "transfer": "the slowest rank; full duplex; NVLink and network one after the other (not overlapped)",
    "load": "the slowest rank; every slice read and written once on each GPU that packs, copies or unpacks it",
    "wake": "the slowest rank; memory for its weights mapped again, nothing copied into it",
}
RANK_COLUMNS = ("in_place", "nvlink_sent", "nvlink_received", "network_sent", "network_received")


def summarize(plan: ReshardPlan, bandwidths: Bandwidths) -> dict[str, Any]:
    """The bytes that a plan moves, by rank and by pair of nodes, and the projected time.

    ``node_links[a][b]`` are the bytes from ranks of node ``a`` to other ranks of node ``b``.
    """
    links = [of(between) for between in (False, True) for of in (plan.sent_bytes, plan.received_bytes)]
    columns = (plan.local_bytes, *links)
    projection = project(plan, bandwidths)
    return {
        "actor": plan.actor,
        "engines": plan.engines,
        "gpus": plan.world,
        "nodes": len(set(plan.nodes)),
        "model_bytes": sum(prod(form.shape) * form.itemsize for form in plan.forms.values()),
        "itemsizes": sorted({form.itemsize for form in plan.forms.values()}),
        "transfers": len(plan.transfers),
        "moved_bytes": plan.moved_bytes,
        "lower_bound_bytes": plan.lower_bound,
        "per_gpu": {name: _spread(column) for name, column in zip(RANK_COLUMNS, columns, strict=True)},
        "ranks": [
            {"rank": rank, "node": plan.nodes[rank], **dict(zip(RANK_COLUMNS, row, strict=True))}
            for rank, row in enumerate(zip(*columns, strict=True))
        ],
        "node_links": _node_links(plan),
        "projection": {
            **{f"{name}_seconds": seconds for name, seconds in asdict(projection).items()},
            "total_seconds": projection.total,
            "bandwidths_gb_s": asdict(bandwidths),
            "notes": _NOTES,
        },
    }


def _spread(column: Sequence[int]) -> dict[str, float]:
    return {"min": min(column), "mean": sum(column) / len(column), "max": max(column)}


def _node_links(plan: ReshardPlan) -> list[list[int]]:
    names = sorted(set(plan.nodes))
    matrix = [[0] * len(names) for _ in names]
    for (source, target), amount in plan.link_bytes.items():
        matrix[names.index(plan.nodes[source])][names.index(plan.nodes[target])] += amount
    return matrix

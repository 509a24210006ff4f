"""The figures of a plan: its bytes, and its projected time at stated bandwidths (not a measurement); pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import numpy as np

from megatron_tlt.reshard.plan import ReshardPlan

_GB = 1e9
_NOTES = {
    "transfer": "the slowest rank; full duplex; NVLink and network one after the other (not overlapped)",
    "load": "the slowest rank; every slice read and written once on each GPU that packs, copies or unpacks it",
    "wake": "the slowest rank; memory for its weights mapped again, nothing copied into it",
}
RANK_COLUMNS = ("in_place", "nvlink_sent", "nvlink_received", "network_sent", "network_received")


@dataclass(frozen=True)
class Bandwidths:
    """Rates of one GPU in GB/s (10**9 bytes), and the fraction of each that is assumed to be reached.

    The defaults are peaks of an 80 GB H100 (SXM) node: NVLink 4 in one direction, one 400 Gb/s port per GPU, HBM3.

    ``wake`` is a measured rate, so that no fraction applies. NVIDIA/srt-slurm, docs/shadow-engine-recovery.md, reports
    vLLM's wake_up of a B200 that mapped 70.4 GiB in 88 allocations in 0.273 s: 277 GB/s. We assume that an H100 reaches
    this with the many smaller allocations of weights.
    """

    nvlink: float = 450.0
    network: float = 50.0
    memory: float = 3350.0
    wake: float = 277.0
    nvlink_efficiency: float = 0.8
    network_efficiency: float = 0.8
    memory_efficiency: float = 0.8


@dataclass(frozen=True)
class Projection:
    """Seconds. Transfer is that of the rank with the longest total over both kinds of link.

    ``nvlink`` and ``network`` are each the maximum over ranks, possibly of different ranks.
    """

    nvlink: float
    network: float
    transfer: float
    load: float
    wake: float

    @property
    def total(self) -> float:
        """Wake, transfer and load, sequentially."""
        return self.transfer + self.load + self.wake


def project(plan: ReshardPlan, bandwidths: Bandwidths) -> Projection:
    """The projection of a plan.

    A link works in both directions at once, so a rank's time on it is that of the larger of bytes sent and received.
    Load counts memory traffic: a read and a write for each byte that is copied in place, packed or unpacked. Wake maps
    the weights of the rank's engine.
    """
    sent, received = (np.array([of(False), of(True)]) for of in (plan.sent_bytes, plan.received_bytes))  # (2, world)
    rates, local = bandwidths, np.array(plan.local_bytes)
    links = [[rates.nvlink * rates.nvlink_efficiency * _GB], [rates.network * rates.network_efficiency * _GB]]
    seconds = np.maximum(sent, received) / links
    copied = 2 * (local + sent.sum(0) + received.sum(0))
    return Projection(
        nvlink=float(seconds[0].max()),
        network=float(seconds[1].max()),
        transfer=float(seconds.sum(0).max()),
        load=float(copied.max() / (rates.memory * rates.memory_efficiency * _GB)),
        wake=float((local + received.sum(0)).max() / (rates.wake * _GB)),
    )


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

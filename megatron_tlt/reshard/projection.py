"""Projected time of a plan at stated bandwidths, from byte counts; not a measurement; pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_tlt.reshard.plan import ReshardPlan

_GB = 1e9


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

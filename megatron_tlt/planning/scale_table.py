"""Which numbers of nodes a config can run on, how fast, and when a change between two of them pays; pure.

FlexTrain looks sizes up in such a table, filled by profiles; here the cost model computes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from math import exp, inf
from typing import Any

from megatron_tlt.errors import ConfigError
from megatron_tlt.planning.elastic import ElasticChoice, LayoutChooser

PAYS = 0.6
"""Least probability with which a change of size pays; FlexTrain's threshold."""


@dataclass(frozen=True)
class ScaleRow:
    """A number of nodes with its fastest layout; ``throughput`` is relative to the config's number of nodes."""

    nodes: int
    choice: ElasticChoice
    throughput: float


@dataclass(frozen=True)
class SizeChange:
    """Growing from ``before`` to ``after`` nodes by one way to reconfigure.

    Attributes:
        way: how, such as ``disk``.
        reconfigure_s: seconds in which training stands still for the change.
        speedup: steps per second after the change over those before it.
        payback_s: seconds after the start of the change until it has made up for the stall; infinite if never.
        probability: that no device of the new size fails before that.
    """

    before: int
    after: int
    way: str
    reconfigure_s: float
    speedup: float
    payback_s: float
    probability: float

    @property
    def pays(self) -> bool:
        return self.probability >= PAYS


def scale_table(chooser: LayoutChooser, sizes: Iterable[int], per_node: int, base: int) -> list[ScaleRow]:
    """Rows for those of ``sizes`` (nodes of ``per_node`` devices) on which a layout fits, ascending.

    ``base`` is the number of nodes whose throughput is 1.

    Raises:
        ConfigError: nothing fits on ``base`` nodes.
    """
    own = chooser.best(base * per_node)
    rows = []
    for nodes in sorted(set(sizes)):
        try:
            choice = chooser.best(nodes * per_node)
        except ConfigError:
            continue  # too small
        rows.append(ScaleRow(nodes, choice, own.total / choice.total))
    return rows


def payback_seconds(reconfigure_s: float, speedup: float) -> float:
    """Seconds after its start at which a change to ``speedup`` times the speed has done as much as no change.

    The job stands still for ``reconfigure_s`` seconds T, then works at S times the old speed: S (t - T) = t at
    t = T S / (S - 1). Infinite if the change does not make it faster.
    """
    return reconfigure_s * speedup / (speedup - 1.0) if speedup > 1.0 else inf


def payback_probability(devices: int, mtbf_hours: float, reconfigure_s: float, speedup: float) -> float:
    """Probability that a new size of ``devices`` devices lasts until its change has paid back the stall.

    Devices fail independently, each once in ``mtbf_hours`` hours on average (a Poisson process of rate lambda per
    device). The next failure of any of n devices ends the size; it comes after more than t seconds with probability
    exp(-lambda n t), here with t of ``payback_seconds``. FlexTrain asks for the same with a speed-up's available time:
    a change pays if this is at least ``PAYS``. The time is counted from the start of the stall, in which devices fail
    too; what is lost by the failure itself would be lost at either size, so it is left out.
    """
    if speedup <= 1.0:
        return 0.0
    return exp(-devices * payback_seconds(reconfigure_s, speedup) / (mtbf_hours * 3600.0))


def size_changes(
    rows: Iterable[ScaleRow], base: int, mtbf_hours: float, reconfigure_s: Mapping[str, float]
) -> list[SizeChange]:
    """Growing from each smaller size back to ``base`` nodes, and from ``base`` to each larger size.

    ``reconfigure_s``: seconds by the way to reconfigure.
    """
    by_nodes = {row.nodes: row for row in rows}
    changes = []
    for nodes in sorted(by_nodes):
        if nodes == base:
            continue
        small, large = (by_nodes[n] for n in sorted((nodes, base)))
        speedup = small.choice.total / large.choice.total
        for way, seconds in reconfigure_s.items():
            probability = payback_probability(large.choice.used, mtbf_hours, seconds, speedup)
            payback = payback_seconds(seconds, speedup)
            changes.append(SizeChange(small.nodes, large.nodes, way, seconds, speedup, payback, probability))
    return changes


def summarize_scale(rows: Iterable[ScaleRow], changes: Iterable[SizeChange]) -> dict[str, Any]:
    """Both as plain data: seconds, bytes, and each size's keys of a launch config."""
    return {
        "sizes": [
            {
                "nodes": row.nodes,
                "actor": str(row.choice.layout),
                "stages": _stages(row.choice),
                "used": row.choice.used,
                "idle": row.choice.idle,
                "seconds": {**asdict(row.choice.seconds), "total": row.choice.total},
                "throughput": row.throughput,
                "margin": row.choice.margin,
                "config": row.choice.overrides(),
            }
            for row in rows
        ],
        "changes": [asdict(change) | {"pays": change.pays} for change in changes],
    }


def _stages(choice: ElasticChoice) -> str:
    """Layers of the first, middle and last stages if they are uneven; else empty."""
    layout = choice.layout
    if layout.first is None or layout.last is None:
        return ""
    middle = (choice.job.model.layers - layout.first - layout.last) // max(1, layout.pp - 2)
    return "+".join(map(str, [layout.first, *[middle] * (layout.pp - 2), layout.last]))

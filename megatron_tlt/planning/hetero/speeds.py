"""The section ``speeds`` of a launch config that divides work as a one-world plan does."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from megatron_tlt.config.speeds import shares_of
from megatron_tlt.planning.hetero.balance import Curve
from megatron_tlt.planning.hetero.cost import CostModel
from megatron_tlt.planning.hetero.plan import Plan

SpeedLists = dict[str, list[float]]
"""``rollout`` and ``actor``: a relative speed of each node or, where devices of a node differ, of each device."""
_DIGITS = 3


def speeds_of(model: CostModel, plan: Plan, problems: int) -> SpeedLists | None:
    """The lists of a plan with both tasks over all devices, in Megatron's order; None where all are equally fast.

    A replica's speed is one over its seconds per micro-batch. An engine's time is not proportional to its share, as the
    longest response takes equally long for any; its speed is the share of responses that is optimal for the cost model.
    It is high enough for one of the ``problems`` of a step. A device has the speed of its replica or engine.
    """
    found: SpeedLists = {}
    for name in ("rollout", "actor"):
        index = model.workflow.index(name)
        placement = plan.placements[index]
        classes = [model.classes((row,))[0] for row in placement.grid]
        curves = [model.replica(index, placement.layout, row).curve for row in classes]
        assert all(curve is not None for curve in curves), "the plan fits"
        own = [curve for curve in curves if curve is not None]
        if len(set(own)) == 1:
            continue
        if name == "actor":
            speeds = _relative([1 / curve.slope for curve in own])
        else:
            order = sorted(range(len(classes)), key=lambda row: classes[row])  # that of the task's shares
            shares = dict(zip(order, model.task(index, plan).shares, strict=True))
            speeds = engine_speeds(own, [shares[row] for row in range(len(own))], problems)
        devices = [0.0] * model.cluster.size
        for row, speed in zip(placement.grid, speeds, strict=True):
            for stage in row:
                for device in stage:
                    devices[device] = speed
        found[name] = _by_node(devices, model.cluster.node_of)
    return found or None


def engine_speeds(curves: Sequence[Curve], shares: Sequence[int], problems: int) -> list[float]:
    """Of engines with these shares, the mean of those with equal curves; each gets one of ``problems`` at least."""
    alike = defaultdict[Curve, list[int]](list)
    for curve, share in zip(curves, shares, strict=True):
        alike[curve].append(share)
    speeds = [sum(alike[curve]) / len(alike[curve]) for curve in curves]
    # a share of one problem is a part of a sum that grows with it
    for _ in range(100 if problems > len(speeds) else 0):
        speeds = [max(speed, sum(speeds) / problems) for speed in speeds]
    speeds = _relative(speeds)
    while problems >= len(speeds) and 0 in shares_of(problems, speeds):
        least = min(speeds)
        speeds = [round(speed + 10**-_DIGITS, _DIGITS) if speed == least else speed for speed in speeds]
    return speeds


def _relative(speeds: Sequence[float]) -> list[float]:
    return [max(round(speed / max(speeds), _DIGITS), 10**-_DIGITS) for speed in speeds]


def _by_node(devices: Sequence[float], node_of: Sequence[int]) -> list[float]:
    """A speed per node, if devices of a node are equally fast; otherwise those of the devices."""
    pairs = zip(pairwise(devices), pairwise(node_of), strict=True)
    if any(one != other for (one, other), (node, next_node) in pairs if node == next_node):
        return list(devices)
    return [devices[node_of.index(node)] for node in range(node_of[-1] + 1)]

"""Plans that treat all devices as equal: even layers and groups, devices in the listed order, even batches mostly."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, pairwise

from megatron_tlt.planning.hetero.cost import INFEASIBLE, CostModel
from megatron_tlt.planning.hetero.plan import Placement, Plan, TaskLayout
from megatron_tlt.planning.hetero.search import HeteroSearchResult
from megatron_tlt.planning.hetero.space import Grouping, Space


def uniform_plan(model: CostModel, *, whole: bool = False) -> HeteroSearchResult:
    """The best uniform plan, with one layout per task, under a model with even layers.

    ``whole``: one group, with every task over all devices, which is what this package can run: with even batches, or
    with those of the section ``speeds``, if the model balances them.
    """
    space = Space(model.cluster, model.workflow)
    groupings = [(0,) * len(model.workflow.tasks)] if whole else space.groupings
    return min((_best_of(model, space, one, whole) for one in groupings), key=lambda found: found.seconds)


def _best_of(model: CostModel, space: Space, grouping: Grouping, whole: bool) -> HeteroSearchResult:
    """Chooses layouts task by task, the sender of weights first: a step is monotone in each task's seconds."""
    count, size = max(grouping) + 1, model.cluster.size
    bounds = [size * group // count for group in range(count + 1)]
    groups = tuple(tuple(range(start, end)) for start, end in pairwise(bounds))
    plan = Plan(grouping, groups, tuple(Placement(TaskLayout(1, 1, 1), groups[group]) for group in grouping))
    sources = {task.weights_from for task in model.workflow.tasks}
    first = [index for index, task in enumerate(model.workflow.tasks) if task.name in sources]
    for index in chain(first, (one for one in range(len(grouping)) if one not in first)):
        plan = min(
            (
                space.with_placement(plan, index, choice)
                for choice in _placements(space, index, groups[grouping[index]], whole)
            ),
            key=partial(_task_seconds, model, index),
            default=plan,
        )
    return HeteroSearchResult(plan, model(plan).seconds, model.evaluations, ())


def _placements(space: Space, task: int, devices: Sequence[int], whole: bool) -> Iterator[Placement]:
    """Every layout, with tensor-parallel groups of consecutive devices, and replicas or stages outermost."""
    for layout in space.layouts(task, len(devices)):
        tp, pp, dp = layout
        if whole and (layout.size < len(devices) or space.workflow.tasks[task].layers % pp):
            continue
        # Megatron's ranks have stages outermost
        if not whole or pp == 1 or dp == 1:
            yield Placement(layout, tuple(devices))
        if pp > 1 and dp > 1:
            chunk = [devices[start : start + tp] for start in range(0, layout.size, tp)]
            used = [one for replica in range(dp) for stage in range(pp) for one in chunk[stage * dp + replica]]
            yield Placement(layout, (*used, *devices[layout.size :]))


def _task_seconds(model: CostModel, index: int, plan: Plan) -> float:
    cost = model.task(index, plan)
    if cost.shortage:
        return INFEASIBLE * (1 + cost.shortage)
    seconds = cost.seconds + model.weights(index, plan)
    return seconds if math.isfinite(seconds) else INFEASIBLE

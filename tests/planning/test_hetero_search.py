"""Plans over unequal devices: costs, the exhaustive optimum, the search."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import permutations, product
from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_tlt.bench.hetero_cases import mixed_64, model, small_instance, step
from megatron_tlt.bench.hetero_exhaustive import Exhaustive
from megatron_tlt.planning.hetero.cluster import Cluster
from megatron_tlt.planning.hetero.cost import INFEASIBLE, CostModel
from megatron_tlt.planning.hetero.plan import Placement, Plan, TaskLayout
from megatron_tlt.planning.hetero.recall import Recall
from megatron_tlt.planning.hetero.report import describe
from megatron_tlt.planning.hetero.search import random_search, search
from megatron_tlt.planning.hetero.space import Space, compositions, groupings
from megatron_tlt.planning.hetero.uniform import uniform_plan
from megatron_tlt.planning.hetero.workflow import Workflow

seeds = st.integers(0, 10_000)


def drawn(seed: int, most: int = 6) -> tuple[CostModel, Space, Plan]:
    """A random instance and a random plan for it."""
    cluster, workflow = small_instance(seed, most)
    space, rng = Space(cluster, workflow), Random(seed)
    grouping = rng.choice(space.groupings)
    return CostModel(cluster, workflow), space, space.plan(grouping, space.sizes(max(grouping) + 1, rng), rng)


def check_whole(plan: Plan, cluster: Cluster, workflow: Workflow) -> None:
    """Every device is in one group, every task's devices are its group's, each once."""
    assert sorted(device for group in plan.groups for device in group) == list(range(cluster.size))
    assert all(plan.groups) and len(plan.placements) == len(workflow.tasks)
    for task, placement in enumerate(plan.placements):
        assert sorted(placement.order) == sorted(plan.groups[plan.group_of[task]])
        assert placement.layout in set(Space(cluster, workflow).layouts(task, len(placement.order)))


def unreduced(model: CostModel) -> float:
    """The least cost over every grouping, set, layout and order of devices, one by one."""
    cluster, workflow = model.cluster, model.workflow
    space, best = Space(cluster, workflow), INFEASIBLE
    for grouping in groupings(len(workflow.tasks), cluster.size):
        for owners in product(range(max(grouping) + 1), repeat=cluster.size):
            groups = tuple(tuple(d for d, owner in enumerate(owners) if owner == g) for g in range(max(grouping) + 1))
            if not all(groups):
                continue
            choices = [
                [
                    Placement(layout, order)
                    for layout in space.layouts(task, len(groups[group]))
                    for order in permutations(groups[group])
                ]
                for task, group in enumerate(grouping)
            ]
            best = min(best, *(model(Plan(grouping, groups, each)).seconds for each in product(*choices)))
    return best


def test_the_reduced_search_finds_what_the_unreduced_one_does() -> None:
    compared = 0
    for seed in range(60):
        cluster, workflow = small_instance(seed, 3)
        if cluster.size == 3 and len(workflow.tasks) > 2:
            workflow = Workflow(tuple(replace(t, after=()) for t in workflow.tasks if t.name in ("rollout", "actor")))
        if cluster.size == 2 and len(workflow.tasks) > 3:
            continue
        model = CostModel(cluster, workflow)
        found = Exhaustive(model).run()
        expected = unreduced(model)
        assert found.feasible == (expected < INFEASIBLE)
        if found.feasible:
            compared += 1
            assert found.seconds == pytest.approx(expected, rel=1e-12)
            assert model(found.plan).seconds == found.seconds
            check_whole(found.plan, cluster, workflow)
        if compared == 8:
            break
    assert compared == 8


@settings(max_examples=40)
@given(seeds)
def test_random_plans_and_their_changes_are_whole_and_never_below_the_optimum(seed: int) -> None:
    model, space, plan = drawn(seed, 5)
    best = Exhaustive(model).run().seconds
    rng = Random(seed)
    for _ in range(12):
        price = model(plan)
        check_whole(plan, model.cluster, model.workflow)
        assert price.seconds >= best * (1 - 1e-12)
        change = rng.choice((space.change_task, space.swap_groups, space.resized))
        space.recall.learn(plan, price.tasks, INFEASIBLE)
        plan = space.regrouped(plan, rng) if rng.random() < 0.3 else change(plan, price.tasks, rng) or plan


def test_a_swap_is_made_where_what_is_known_of_the_tasks_makes_the_step_shorter() -> None:
    cluster, workflow = mixed_64(), step(model("Qwen2.5-7B"), 2048, 2048.0, 8192.0, asynchronous=True)
    cost, space, rng = CostModel(cluster, workflow), Space(cluster, workflow), Random(0)

    def drawn_one() -> tuple[Plan, float, tuple[float, ...]]:
        plan = space.plan((0, 1, 1, 1), (32, 32), rng)
        price = cost(plan)
        space.recall.learn(plan, price.tasks, INFEASIBLE)
        return plan, price.seconds, price.tasks

    plan, before, tasks = next(one for one in iter(drawn_one, None) if one[1] < INFEASIBLE)
    space = Space(cluster, workflow)
    space.recall.learn(plan, tasks, INFEASIBLE)
    assert all(space.swap_groups(plan, tasks, rng) is None for _ in range(20)), "nothing faster is known"
    for _ in range(300):
        drawn_one()
    evaluated = cost.evaluations
    swapped = next(other for _ in range(20) if (other := space.swap_groups(plan, tasks, rng)) is not None)
    assert cost.evaluations == evaluated
    check_whole(swapped, cluster, workflow)
    assert [len(group) for group in swapped.groups] == [32, 32] and swapped.groups != plan.groups
    assert cost(swapped).seconds < before


def test_what_is_fast_on_some_devices_does_not_push_out_what_is_known_of_others() -> None:
    """Many placements on two devices of one class, and a slower one on two of other classes."""
    cluster = mixed_64()
    first = [cluster.class_of.index(kind) for kind in range(3)]
    alike, others = (first[0], first[0] + 1), (first[1], first[2])
    recall = Recall(cluster, 1)

    def learn(devices: tuple[int, ...], seconds: float, layout: TaskLayout) -> None:
        recall.learn(Plan((0,), (devices,), (Placement(layout, devices),)), [seconds], INFEASIBLE)

    for number in range(20):
        learn(alike, 1.0 + number / 100, TaskLayout(2, 1, 1) if number % 2 else TaskLayout(1, 2, 1))
    learn(others, 5.0, TaskLayout(1, 1, 2))
    found = recall.best(0, others)
    assert found is not None and found.layout == TaskLayout(1, 1, 2)
    best = recall.best(0, [*others, *alike])
    assert best is not None and best.layout == TaskLayout(1, 2, 1) and set(best.devices) == set(alike)
    assert recall.best(0, others[:1]) is None


@settings(max_examples=40)
@given(seeds, st.sampled_from(("flops", "memory_bandwidth", "node_bandwidth", "links", "latency", "host")))
def test_no_plan_gets_slower_with_a_faster_part(seed: int, part: str) -> None:
    model, _, plan = drawn(seed)
    assume(model(plan).feasible)
    cluster, rng = model.cluster, Random(seed)
    if part in ("links", "latency"):
        name, factor = ("bandwidth", 3.0) if part == "links" else ("latency", 0.2)
        table = [list(row) for row in getattr(cluster, name)]
        a, b = rng.randrange(len(table)), rng.randrange(len(table))
        table[a][b] *= factor
        table[b][a] = table[a][b]
        faster = replace(cluster, **{name: tuple(map(tuple, table))})
    elif part == "host":
        faster = replace(cluster, host_bandwidth=cluster.host_bandwidth * 2)
    else:
        which = rng.randrange(cluster.size)
        devices = list(cluster.devices)
        devices[which] = replace(devices[which], **{part: 2.5 * getattr(devices[which], part)})
        faster = replace(cluster, devices=tuple(devices))
    assert CostModel(faster, model.workflow)(plan).seconds <= model(plan).seconds * (1 + 1e-12)


@settings(max_examples=25)
@given(seeds)
def test_a_plan_that_fits_leaves_memory_on_every_device(seed: int) -> None:
    cluster, workflow = small_instance(seed)
    model = CostModel(cluster, workflow)
    found = search(model, 60, seed)
    check_whole(found.plan, cluster, workflow)
    report = describe(model, found.plan)
    assert bool(report.shortages) != found.feasible
    for task, own in zip(report.tasks, workflow.tasks, strict=bool(report.tasks)):
        assert sum(replica.share for replica in task.replicas) == own.units
        for replica in task.replicas:
            assert sum(stage.layers for stage in replica.stages) == own.layers
            assert all(0 < stage.needed_bytes <= stage.usable_bytes for stage in replica.stages)


@settings(max_examples=12)
@given(seeds, st.booleans(), st.integers(1, 120))
def test_the_search_is_seeded_and_keeps_to_its_budget(seed: int, swaps: bool, evaluations: int) -> None:
    cluster, workflow = small_instance(seed)
    model = CostModel(cluster, workflow)
    found = search(model, evaluations, seed, swaps=swaps)
    assert found.evaluations == model.evaluations == evaluations
    assert found == search(CostModel(cluster, workflow), evaluations, seed, swaps=swaps)
    improved = [seconds for _, seconds in found.trace]
    assert improved == sorted(improved, reverse=True) and found.seconds == improved[-1]
    assert model(found.plan).seconds == found.seconds


def test_small_clusters_get_their_best_plan() -> None:
    met = 0
    for seed in range(200, 212):
        cluster, workflow = small_instance(seed, 4)
        best = Exhaustive(CostModel(cluster, workflow)).run()
        if best.feasible:
            met += 1
            assert search(CostModel(cluster, workflow), 1500, seed).seconds <= 1.02 * best.seconds
    assert met >= 6


def test_searching_beats_drawing_on_many_devices() -> None:
    workflow = step(model("Qwen2.5-7B"), 512, 2048.0, 8192.0, asynchronous=True)
    cluster = mixed_64()
    searched = search(CostModel(cluster, workflow), 400, 0)
    rolled = random_search(CostModel(cluster, workflow), 400, 0)
    assert searched.feasible and searched.seconds < rolled.seconds
    check_whole(searched.plan, cluster, workflow)


def test_equal_devices_leave_nothing_to_gain_from_balance() -> None:
    cluster, workflow = mixed_64(), step(model("Qwen2.5-7B"), 512, 2048.0, 8192.0, asynchronous=False)
    keep = range(16)
    alike = replace(
        cluster, devices=tuple(cluster.devices[d] for d in keep), node_of=tuple(cluster.node_of[d] for d in keep)
    )
    even = uniform_plan(CostModel(alike, workflow, balanced=False))
    assert even.feasible
    assert CostModel(alike, workflow)(even.plan).seconds == pytest.approx(even.seconds, rel=0.01)
    whole = uniform_plan(CostModel(alike, workflow, balanced=False), whole=True).plan
    assert whole.groups == (tuple(keep),) and all(placement.layout.size == 16 for placement in whole.placements)


def test_groupings_and_sizes_are_all_of_them() -> None:
    assert [len(list(groupings(tasks, tasks))) for tasks in (1, 2, 3, 4)] == [1, 2, 5, 15]
    assert len(list(groupings(4, 2))) == 8
    assert sorted(compositions(5, 2)) == [(1, 4), (2, 3), (3, 2), (4, 1)]
    assert Counter(map(sum, compositions(6, 3))) == {6: 10}


def test_groups_work_side_by_side_and_tasks_of_a_group_in_turn() -> None:
    workflow = step(model("Qwen2.5-7B"), 8, 10.0, 20.0, asynchronous=False)
    seconds = (10.0, 3.0, 5.0, 4.0)
    assert workflow.step_seconds(seconds, (0, 0, 0, 0)) == 22
    assert workflow.step_seconds(seconds, (0, 0, 0, 1)) == 18
    assert workflow.step_seconds(seconds, (0, 1, 2, 3)) == 18
    ahead = replace(workflow, asynchronous=True)
    assert ahead.step_seconds(seconds, (0, 1, 1, 1)) == 12 and ahead.step_seconds(seconds, (0, 0, 0, 0)) == 22

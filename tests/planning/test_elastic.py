"""The layout for the devices that are left: always valid, never slower with more of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from math import lcm

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_tlt.config.layouts import Layout, problems
from megatron_tlt.errors import ConfigError
from megatron_tlt.planning.cost import step_time
from megatron_tlt.planning.elastic import ElasticChoice, best_layout, whole_nodes
from megatron_tlt.planning.job import Job
from megatron_tlt.planning.machine import Machine, from_data_sheet, processor
from megatron_tlt.planning.memory import MemoryPlan, plan_memory
from megatron_tlt.planning.model_size import ModelSize
from tests.planning.jobs import job

DENSE = ModelSize(6, 2048, 16, 4, 128, 8192, 32000, dense_ffn=8192)
EXPERTS = ModelSize(4, 1024, 16, 4, 64, 512, 32000, experts=8, top_k=2, dense_ffn=4096)
H100, MEAN = from_data_sheet("H100-80GB"), 500.0


def _job(model: ModelSize, tp: int, pp: int, dp: int, ep: int, engine: int, responses: int, per_node: int) -> Job:
    layout = Layout(tp * pp * dp, tp=tp, pp=pp, ep=ep, sp=tp > 1)
    one = job(model, layout, max_tokens=2048)
    return replace(
        one,
        engine=replace(one.engine, tp=engine, max_sequences=32),
        devices_per_node=per_node,
        prompt_tokens=256,
        response_tokens=1024,
        responses=responses,
        prompts=max(1, responses // 2),
    )


jobs = st.builds(
    _job,
    model=st.sampled_from([DENSE, EXPERTS, replace(DENSE, layers=7, tied=True)]),
    tp=st.sampled_from([1, 2]),
    pp=st.sampled_from([1, 2]),
    dp=st.sampled_from([2, 4]),
    ep=st.just(1),
    engine=st.sampled_from([1, 2]),
    responses=st.sampled_from([8, 24, 64]),
    per_node=st.sampled_from([2, 4, 8]),
)
machines = st.sampled_from([H100, from_data_sheet("L4-24GB"), processor(2, 80e9)])


def _plan(machine: Machine, capacity: float) -> Callable[[Job], MemoryPlan]:
    return lambda one: plan_memory(one, capacity, None, on_gpu=not machine.is_cpu)


def _best(
    one: Job, machine: Machine, devices: int | tuple[int, ...], capacity: float, strict: bool = False
) -> ElasticChoice | None:
    try:
        return best_layout(one, machine, _plan(machine, capacity), devices, MEAN, strict=strict)
    except ConfigError:
        return None


def _exhaustive(one: Job, machine: Machine, left: tuple[int, ...], capacity: float) -> float | None:
    """The fastest time over evenly divided layouts, each evaluated whole; None if none fits."""
    own, plan, times = one.actor.layout, _plan(machine, capacity), []
    unit = lcm(own.tp, one.engine.tp)
    for per_node in {one.devices_per_node, *range(unit, one.devices_per_node, unit)}:
        for nodes in range(1, sum(count >= per_node for count in left) + 1):
            world = nodes * per_node
            for pp in range(1, one.model.layers + 1):
                layout = replace(own, world=world, pp=pp)
                if problems(layout, one.model.shape) or world % one.engine.tp:
                    continue
                if layout.dp > one.responses // one.mini_batches or world // one.engine.tp > one.prompts:
                    continue
                choice = replace(one, actor=replace(one.actor, layout=layout), devices_per_node=per_node)
                memory = plan(choice)
                if memory.fits:
                    times.append(step_time(choice, machine, memory, MEAN, None).total)
    return min(times, default=None)


@settings(max_examples=25, deadline=None)
@given(jobs, machines, st.lists(st.integers(0, 8), min_size=1, max_size=4), st.floats(6e9, 80e9), st.booleans())
def test_a_choice_is_valid(one: Job, machine: Machine, left: list[int], capacity: float, strict: bool) -> None:
    devices = tuple(min(count, one.devices_per_node) for count in left)
    found = _best(one, machine, devices, capacity, strict)
    assume(found is not None)
    assert found is not None
    own, layout = one.actor.layout, found.layout
    assert not problems(layout, one.model.shape)
    assert (layout.tp, layout.cp, layout.ep, layout.etp) == (own.tp, own.cp, own.ep, own.etp)
    assert found.used == found.nodes * found.per_node == sum(devices) - found.idle
    nodes = found.nodes_of(devices)
    assert len(nodes) == found.nodes and all(devices[node] >= found.per_node for node in nodes)
    # groups that fit into a node do not leave it
    assert found.per_node == one.devices_per_node or not found.per_node % lcm(own.tp, one.engine.tp)
    assert not found.used % one.engine.tp and found.used // one.engine.tp <= one.prompts
    assert layout.dp <= one.responses // one.mini_batches
    memory = _plan(machine, capacity)(found.job)
    assert memory.fits and memory.margin == found.margin
    assert step_time(found.job, machine, memory, MEAN, None).total == pytest.approx(found.total)
    if strict:
        assert layout.dp in (1, 2, 4) and layout.dp <= own.dp
        assert not one.model.tied or (layout.pp == 1) == (own.pp == 1)
    again = _best(one, machine, devices, capacity, strict)
    assert again == found


@settings(max_examples=25, deadline=None)
@given(
    jobs,
    machines,
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 2)), min_size=1, max_size=4),
    st.floats(6e9, 80e9),
    st.booleans(),
)
def test_more_devices_are_never_slower(
    one: Job, machine: Machine, left: list[tuple[int, int]], capacity: float, strict: bool
) -> None:
    fewer = tuple(min(count, one.devices_per_node) for count, _ in left)
    more = tuple(min(count + added, one.devices_per_node) for count, added in left)
    small = _best(one, machine, fewer, capacity, strict)
    assume(small is not None)
    assert small is not None
    large = _best(one, machine, more, capacity, strict)
    assert large is not None and large.total <= small.total


@settings(max_examples=15, deadline=None)
@given(jobs, machines, st.integers(1, 12), st.floats(6e9, 80e9))
def test_bounds_leave_out_nothing_that_is_faster(one: Job, machine: Machine, count: int, capacity: float) -> None:
    left = whole_nodes(count, one.devices_per_node)
    fastest, found = _exhaustive(one, machine, left, capacity), _best(one, machine, left, capacity)
    if fastest is not None:
        assert found is not None and found.total <= fastest * (1 + 1e-9)


@settings(max_examples=15, deadline=None)
@given(jobs, machines)
def test_the_whole_world_is_at_least_as_fast_as_configured(one: Job, machine: Machine) -> None:
    assume(not problems(one.actor.layout, one.model.shape) and one.engines <= one.prompts)
    memory = _plan(machine, 80e9)(one)
    assume(not one.world % one.devices_per_node and memory.fits)
    found = _best(one, machine, one.world, 80e9)
    assert found is not None
    assert found.total <= step_time(one, machine, memory, MEAN, None).total * (1 + 1e-9)


def test_devices_stay_idle_where_no_layout_takes_all() -> None:
    # at most three stages, and one or two ranks of data parallelism
    one = _job(replace(DENSE, layers=3), 4, 1, 2, 1, 4, 64, 4)
    found = best_layout(one, H100, _plan(H100, 80e9), 7 * 4, MEAN, strict=True)
    assert found.idle >= 4 and found.layout.dp <= 2
    # the same at most six nodes where three stages are needed for memory: the states of a third of the layers
    three = replace(one, actor=replace(one.actor, layout=replace(one.actor.layout, world=24, pp=3)))
    capacity = plan_memory(three, 80e9, None).fullest.total * 1.001
    three = replace(three, engine=replace(three.engine, cache_tokens=4096))
    found = best_layout(three, H100, _plan(H100, capacity), 7 * 4, MEAN, strict=True)
    assert (found.layout.pp, found.layout.dp, found.nodes, found.idle) == (3, 2, 6, 4)


def test_layers_that_do_not_divide_leave_fewer_to_the_ends() -> None:
    one = _job(replace(DENSE, layers=7), 2, 1, 2, 1, 1, 64, 2)
    one = replace(one, responses=1, prompts=8, mini_batches=1)  # no data parallelism
    found = best_layout(one, H100, _plan(H100, 80e9), 3 * 2, MEAN)
    assert found.layout.dp == 1
    if found.layout.pp == 3:
        assert (found.layout.first, found.layout.last) == (2, 2)
    megatron = found.overrides()["actor"]["megatron"]
    assert megatron["pipeline_model_parallel_size"] == found.layout.pp
    assert Layout.read(megatron | {"tensor_model_parallel_size": 2, "sequence_parallel": True}, 6) == replace(
        found.layout, world=6
    )
    assert found.overrides()["launcher"] == {"nnodes": found.nodes, "nproc_per_node": found.per_node}


def test_a_node_that_lost_a_device_gives_what_whole_groups_take() -> None:
    one = _job(DENSE, 2, 1, 4, 1, 2, 64, 8)
    found = best_layout(one, H100, _plan(H100, 80e9), (7,), MEAN)
    assert (found.nodes, found.per_node, found.idle) == (1, 6, 1)
    found = best_layout(one, H100, _plan(H100, 80e9), (3, 8, 7), MEAN)
    assert found.used == max(8, 2 * 6) and found.nodes_of((3, 8, 7)) == (1, 2)


def test_strict_sums_in_one_tree_and_refuses_tied_ends_by_name() -> None:
    one = _job(DENSE, 1, 1, 2, 1, 1, 64, 8)
    relaxed = best_layout(one, H100, _plan(H100, 80e9), 7, MEAN)
    strict = best_layout(one, H100, _plan(H100, 80e9), 7, MEAN, strict=True, logical_shards=4)
    assert relaxed.layout.dp not in (1, 2, 4) and strict.layout.dp in (1, 2, 4)
    for shards in (1, 3, 0, 6):
        with pytest.raises(ConfigError, match=f"logical_shards: found {shards} .*allowed: a power of two"):
            best_layout(one, H100, _plan(H100, 80e9), 8, MEAN, strict=True, logical_shards=shards)
    tied = _job(replace(DENSE, tied=True), 1, 2, 2, 1, 1, 64, 8)
    with pytest.raises(ConfigError, match=r"strict: the model's embeddings are tied.*pipeline parallel 2 or more"):
        best_layout(tied, H100, _plan(H100, 80e9), 1, MEAN, strict=True)


def test_errors_say_what_is_short() -> None:
    one = _job(DENSE, 2, 1, 4, 1, 2, 64, 8)
    with pytest.raises(ConfigError, match=r"8 device\(s\) on 1 node\(s\): no layout with TP2.*\n.*allowed: 1.0 GB"):
        best_layout(one, H100, _plan(H100, 1e9), 8, MEAN)
    with pytest.raises(ConfigError, match=r"no layout with TP2.*\nallowed: a pipeline of at most 6 stages"):
        best_layout(one, H100, _plan(H100, 80e9), 1, MEAN)
    for left in ((), (0, 0), (9,), (-1, 8)):
        with pytest.raises(ConfigError, match=r"devices: found .*allowed: 0 to 8 on each, at least one in all"):
            best_layout(one, H100, _plan(H100, 80e9), left, MEAN)


def test_whole_nodes() -> None:
    assert whole_nodes(20, 8) == (8, 8, 4) and whole_nodes(16, 8) == (8, 8) and whole_nodes(3, 8) == (3,)


def test_the_launcher_needs_no_torch() -> None:
    code = "import sys, megatron_tlt.planning.elastic; print({'torch', 'vllm', 'megatron'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"

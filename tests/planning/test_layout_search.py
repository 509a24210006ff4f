"""The search: what it leaves out is never the best, and what it finds can be run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_tlt.config.layouts import Layout, problems
from megatron_tlt.planning.cost import step_time
from megatron_tlt.planning.job import DrafterJob, EngineJob, Job
from megatron_tlt.planning.layout_search import actor_layouts, engine_sizes, micro_batch_tokens, recomputes, search
from megatron_tlt.planning.machine import from_data_sheet, processor
from megatron_tlt.planning.memory import MemoryPlan, plan_memory
from megatron_tlt.planning.model_size import ModelSize
from tests.planning.jobs import MOE, SEVEN, job

DENSE = ModelSize(4, 2048, 16, 4, 128, 8192, 32000, dense_ffn=8192)
EXPERTS = ModelSize(4, 1024, 16, 4, 64, 512, 32000, experts=8, top_k=2, dense_ffn=4096)
MEAN = 1000.0

jobs = st.builds(
    lambda model, world, nodes, prompt, response, responses, layers, trained: replace(
        job(replace(model, layers=layers), Layout(world)),
        devices_per_node=max(1, world // nodes),
        prompt_tokens=prompt,
        response_tokens=response,
        responses=responses,
        prompts=max(1, responses // 4),
        drafter=DrafterJob(False, 0, 1, prompt + response, 1024, 1, 5) if trained else None,
        engine=EngineJob(1, False, 2, 2, 0.7, 64, 8192),
    ),
    st.sampled_from([DENSE, EXPERTS]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2]),
    st.just(512),
    st.sampled_from([1024, 4096, 16384]),
    st.sampled_from([8, 32, 64]),
    st.sampled_from([2, 4]),
    st.booleans(),
)


@settings(max_examples=25)
@given(jobs, st.sampled_from(["H100-80GB", "L4-24GB", "cpu"]), st.floats(3e9, 80e9))
def test_pruning_keeps_the_best(one: Job, device: str, capacity: float) -> None:
    machine = processor(2, capacity) if device == "cpu" else from_data_sheet(device)

    def plan(choice: Job) -> MemoryPlan:
        return plan_memory(choice, capacity, None, on_gpu=not machine.is_cpu)

    pruned = search(one, machine, plan, MEAN, keep=1)
    whole = search(one, machine, plan, MEAN, keep=1, prune=False)
    assert pruned.layouts == whole.layouts and pruned.choices <= whole.choices
    assert [found.total for found in pruned.best] == pytest.approx([found.total for found in whole.best])
    for found in pruned.best:
        memory = plan(found.job)
        assert memory.fits and memory.margin == found.margin
        assert step_time(found.job, machine, memory, MEAN, None).total == pytest.approx(found.total)


def test_the_space_is_every_layout_that_the_libraries_take() -> None:
    one = replace(job(DENSE, Layout(8)), devices_per_node=8)
    found = list(actor_layouts(one))
    assert len(set(found)) == len(found) and all(not problems(layout, DENSE.shape) for layout in found)
    sizes = {(layout.tp, layout.pp, layout.cp) for layout in found}
    by_hand = {
        (tp, pp, cp)
        for tp in (1, 2, 4, 8)  # of 16 heads and 4 key-value heads
        for pp in (1, 2, 4)  # of 4 layers
        for cp in (1, 2, 4, 8)
        if 8 % (tp * pp * cp) == 0
    }
    assert sizes == by_hand
    assert {layout.vpp for layout in found if layout.pp == 2} == {None, 2}
    experts = list(actor_layouts(replace(one, model=EXPERTS)))
    assert {layout.ep for layout in experts} == {1, 2, 4, 8}
    assert {layout.etp for layout in experts if layout.tp > 1} == {None, 1}


def test_an_engine_needs_a_prompt_and_heads_that_divide() -> None:
    assert engine_sizes(replace(job(SEVEN, Layout(8)), prompts=8)) == [1, 2, 4]
    assert engine_sizes(replace(job(SEVEN, Layout(8)), prompts=4)) == [2, 4]
    assert engine_sizes(replace(job(MOE, Layout(8)), prompts=8)) == [1, 2, 4, 8]


def test_sizes_that_are_tried() -> None:
    assert micro_batch_tokens(job(max_tokens=20000)) == [16384, 20000, 32768, 65536]
    assert [str(one) for one in recomputes(job())] == ["none", "selective", "full"]
    assert recomputes(job(MOE))[1].modules == ("moe",)


def test_less_memory_never_gives_a_faster_step() -> None:
    machine, times = from_data_sheet("H100-80GB"), []
    for capacity in (80e9, 40e9, 24e9):
        found = search(
            replace(job(SEVEN, Layout(8)), responses=64), machine, lambda j, c=capacity: plan_memory(j, c, None), MEAN
        )
        times.append(found.best[0].total if found.best else float("inf"))
    assert times == sorted(times) and times[0] < float("inf")

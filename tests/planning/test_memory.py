"""Memory per device and phase: counted like the libraries', and never better for being given more to hold."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_tlt.bench.tiny_models import TINY_MODELS, family_config
from megatron_tlt.config.layouts import Layout, problems
from megatron_tlt.config.loader import load_config
from megatron_tlt.config.lora import LoraConfig
from megatron_tlt.config.shipped import shipped
from megatron_tlt.models.architecture import sizes_of
from megatron_tlt.models.lora_weights import adapter_shapes
from megatron_tlt.models.weight_map import WeightMap
from megatron_tlt.planning.actor_memory import layer_activations, micro_batches, stage_memory
from megatron_tlt.planning.cost import step_time
from megatron_tlt.planning.engine_memory import base_copy, drafter_memory, engine_memory
from megatron_tlt.planning.job import DrafterJob, Job, Recompute, adapter_weights, job_of
from megatron_tlt.planning.machine import find_machine
from megatron_tlt.planning.memory import plan_memory
from megatron_tlt.planning.model_size import ModelSize
from megatron_tlt.planning.optimizer_state import OptimizerMemory
from megatron_tlt.planning.remedies import remedies
from megatron_tlt.planning.summary import summarize_step
from megatron_tlt.reshard.engine_layout import engine_side
from tests.helpers.launch import run_torchrun
from tests.planning.jobs import MOE, SEVEN, job

WORKER = Path(__file__).parent / "workers" / "kept.py"
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
TOKENS = 256
CASES = {
    "dense": ("qwen2-tied", {}),
    "selective": ("qwen2-tied", {"recompute_granularity": "selective"}),
    "full": ("qwen2-tied", {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}),
    "normed heads": ("qwen3-tied", {}),
    "experts": ("qwen3-moe", {}),
}


@pytest.mark.distributed
def test_layers_keep_what_is_counted(tmp_path: Path) -> None:
    cases = {name: {"family": family, "megatron": megatron} for name, (family, megatron) in CASES.items()}
    values = {"cases": cases, "sizes": SIZES, "tokens": TOKENS}
    run_torchrun(WORKER, 1, [json.dumps(values), str(tmp_path / "kept.json")], timeout_s=200)
    measured = json.loads((tmp_path / "kept.json").read_text())
    for name, (family, megatron) in CASES.items():
        kind, own = TINY_MODELS[family]
        model = ModelSize.of(family_config(kind, **{**own, **SIZES}))
        recompute = Recompute(megatron.get("recompute_granularity"))
        actor = job(model, Layout(1), recompute=recompute, bf16=False, fused=False, max_tokens=TOKENS).actor
        one = layer_activations(model, actor)
        expected = one.input if recompute.granularity == "full" else one.kept
        assert measured[name] == pytest.approx(expected, rel=0.04), name


def test_states_by_hand() -> None:
    (stage,) = stage_memory(job(layout=Layout(8, tp=4, sp=True)))
    weights = stage.held.total
    assert weights == pytest.approx(SEVEN.parameters / 4, rel=1e-3)
    assert (stage.weights, stage.gradients) == (2 * weights, 4 * weights)
    assert stage.optimizer == 12 * weights / 2  # over two data-parallel ranks
    (wide,) = stage_memory(job(layout=Layout(8, tp=4, sp=True), bf16=False, optimizer=OptimizerMemory(8)))
    assert (wide.weights, wide.optimizer) == (4 * weights, 4 * weights)


@pytest.mark.parametrize(
    ("family", "targets"), [("qwen2-untied", ("attention", "mlp")), ("qwen3-moe", ("q_proj", "experts"))]
)
def test_adapters_are_counted_as_their_tensors(family: str, targets: tuple[Any, ...]) -> None:
    kind, own = TINY_MODELS[family]
    config = family_config(kind, **own)
    tensors = adapter_shapes(WeightMap(config).shapes, targets, 4)
    assert adapter_weights(ModelSize.of(config), LoraConfig(rank=4, targets=targets)) == sum(
        prod(shape) for shape in tensors.values()
    )


def test_a_rank_keeps_a_sum_of_gradients_for_each_level_of_its_part_of_the_tree() -> None:
    (own,) = stage_memory(job(layout=Layout(2)))
    for shards, sums in ((None, 0), (2, 0), (4, 1), (8, 2)):
        (stage,) = stage_memory(job(layout=Layout(2), logical_shards=shards))
        assert stage.gradients == (1 + sums) * own.gradients and stage.optimizer == own.optimizer


def test_frozen_weights_have_neither_gradients_nor_states() -> None:
    (whole,), (few,) = stage_memory(job(trained=1.0)), stage_memory(job(trained=0.01))
    assert few.gradients == pytest.approx(0.01 * whole.gradients)
    assert few.optimizer == pytest.approx(0.01 * whole.optimizer)
    assert few.weights == pytest.approx(1.01 * whole.weights)


def test_pipeline_stages_hold_the_micro_batches_that_are_in_flight() -> None:
    def kept(layout: Layout, **changes: int) -> list[float]:
        one = job(layout=layout, **changes)
        return [round(stage.activations / layer_activations(SEVEN, one.actor).kept, 1) for stage in stage_memory(one)]

    first = kept(Layout(8, tp=2, pp=4, sp=True))
    assert [round(a - b) for a, b in itertools.pairwise(first)] == [7, 7, 7]  # layers of a micro-batch each
    assert kept(Layout(8, tp=2, pp=4, sp=True), responses=1) == pytest.approx([first[-1]] * 4, abs=0.4)
    # (2 x 3 + (2 - 1) x 4 + 1) chunks of 7 layers on the first stage: 2104.04473's warm-up, and one more
    interleaved = kept(Layout(8, tp=2, pp=4, vpp=7, sp=True))
    assert interleaved[0] == pytest.approx((6 + 6 * 4 + 1) / 7 * 7 + first[0] - 4 * 7, abs=1.5)


def test_expert_states_shrink_with_expert_parallelism() -> None:
    sizes = [stage_memory(job(MOE, Layout(32, tp=4, ep=n, etp=1, sp=True)))[0] for n in (1, 2, 4, 8)]
    experts = MOE.layers * MOE.layer_feed_forward
    for n, stage in zip((1, 2, 4, 8), sizes, strict=True):
        assert stage.held.expert == experts // n
        # the optimizer's share of them is the same: fewer replicas share fewer weights
        assert stage.optimizer == pytest.approx(sizes[0].optimizer)


layouts = st.builds(
    lambda tp, pp, dp, cp, vpp: Layout(tp * pp * dp * cp, tp=tp, pp=pp, cp=cp, sp=tp > 1, vpp=vpp if pp > 1 else None),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4, 7]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
    st.sampled_from([None, 2]),
)
recomputes = st.sampled_from(
    [Recompute(), Recompute("selective"), Recompute("selective", modules=("mlp",)), Recompute("full")]
)


def largest(one: Job) -> float:
    return max(phase.total for phase in plan_memory(one, 80e9, None).phases if phase.phase == "update")


@settings(max_examples=60)
@given(layouts, recomputes, st.sampled_from([4096, 16384, 32768]))
def test_more_to_hold_never_takes_less(layout: Layout, recompute: Recompute, tokens: int) -> None:
    assume(not problems(layout, SEVEN.shape))
    one = job(layout=layout, recompute=recompute, max_tokens=tokens)
    plan = plan_memory(one, 80e9, None)
    assert all(phase.total == sum(phase.parts.values()) for phase in plan.phases)
    assert plan.fits == (not plan.problems())
    assert largest(replace(one, actor=replace(one.actor, max_tokens=2 * tokens))) > largest(one)
    assert largest(replace(one, model=replace(one.model, layers=2 * one.model.layers))) > largest(one)
    whole = replace(one, actor=replace(one.actor, recompute=Recompute()))
    assert largest(one) <= largest(whole) * 1.001
    twice = replace(layout, world=2 * layout.world)  # more data-parallel ranks
    assert largest(replace(one, actor=replace(one.actor, layout=twice))) <= largest(one)


def test_an_engine_and_a_drafter_by_hand() -> None:
    one = job(drafter=DrafterJob(False, 0, 1, 16384, 1024, 4, 20))
    engine = engine_memory(one, None)
    assert engine.weights == pytest.approx(2 * SEVEN.parameters, rel=0.001)
    assert engine.cache_token == 2 * 29 * 4 * 128 * 2  # keys and values of 28 layers and the head's
    assert engine_memory(replace(one, engine=replace(one.engine, tp=8)), None).cache_token == 2 * 29 * 128 * 2
    trained = drafter_memory(one)
    assert trained is not None
    head = 2 * 3584**2 + 2 * 3584 * (3584 + 512) + 3 * 3584 * 18944
    assert trained.states == 12 * head + 2 * 2 * 152064 * 3584
    further = drafter_memory(replace(one, drafter=replace(one.drafter, steps=2)))  # type: ignore[type-var]
    assert further is not None and further.step > trained.step + 16384**2 / 1024 * 2 * 3584 * 2


@pytest.mark.parametrize("name", [name for name in shipped() if name.endswith("8g")])
def test_an_engine_takes_the_weights_that_the_transfer_brings(name: str) -> None:
    """Counted tensor by tensor by the rules of vLLM's layers, on every rank of an engine."""
    config = load_config(shipped()[name], check_libraries=False)
    one, weights = job_of(config, on_gpu=True), WeightMap(*sizes_of(config))
    entry = {key: prod(shape) // shape[weights.cut_dims[key]] for key, shape in weights.shapes.items()}
    planned = engine_memory(one, None).weights
    for spans in engine_side(weights, one.engine.tp, one.engine.tp, one.engine.spread_experts).spans:
        brought = sum(span.length * entry[span.tensor] for span in spans) * one.engine.itemsize
        # the rows that pad a vocabulary are not brought
        assert planned == pytest.approx(brought, rel=2e-3)


def test_what_would_fit_is_said_and_fits() -> None:
    one = job(layout=Layout(8, tp=1), max_tokens=32768)
    plan = plan_memory(one, 80e9, None)
    assert not plan.fits and "GB on the devices of pipeline stage 0; allowed: 80.0 GB" in plan.problems()[0]
    found = remedies(one, lambda changed: plan_memory(changed, 80e9, None))
    assert found and all(remedy.margin >= 0 for remedy in found)
    assert any("tensor_model_parallel_size=" in key for remedy in found for key in remedy.overrides)
    hopeless = remedies(one, lambda changed: plan_memory(changed, 8e9, None))
    assert hopeless == []


def test_micro_batches_hold_the_longest_responses() -> None:
    assert micro_batches(job(responses=16)) == 8  # of two data-parallel ranks
    assert micro_batches(job(responses=16, max_tokens=2 * 16384)) == 4
    assert micro_batches(job(responses=1)) == 1


def test_sizes_are_read_from_a_description() -> None:
    values = SimpleNamespace(**{**family_config("qwen3_moe", num_experts=4, num_experts_per_tok=2).to_dict()})
    values.num_local_experts = 4
    assert (ModelSize.of(values).experts, ModelSize.of(values).top_k) == (4, 2)


def test_at_the_start_the_engine_is_alone_and_the_policies_have_no_engine_beside_them() -> None:
    plan = plan_memory(replace(job(SEVEN, Layout(8, tp=2)), reference=True), 80e9, None)
    phases = {phase.phase: phase for phase in plan.phases}
    assert list(phases)[:2] == ["start, policy", "start, engine"]
    policy, engine = phases["start, policy"].parts, phases["start, engine"]
    assert {"weights", "gradients", "optimizer", "reference"} <= policy.keys() and "KV cache" not in policy
    assert engine.total == phases["rollout"].total and not {"gradients", "optimizer"} & engine.parts.keys()
    on_cpu = {phase.phase for phase in plan_memory(job(SEVEN, Layout(8, tp=2)), 80e9, None, on_gpu=False).phases}
    assert "start, engine" not in on_cpu, "there everything shares one memory"


def test_adapters_cost_an_engine_its_weights_once_more_on_the_host() -> None:
    plain = job(SEVEN, Layout(8, tp=2))
    plain = replace(plain, engine=replace(plain.engine, tp=2))
    adapted = replace(plain, adapters=True)
    weights = engine_memory(plain, None).weights
    assert (base_copy(plain), base_copy(adapted)) == (0.0, weights)
    assert weights == pytest.approx(SEVEN.parameters / 2 * 2, rel=0.01), "bfloat16, over two ranks"
    # on a GPU the device has nothing more; on CPUs its memory is the host's, in every phase
    assert plan_memory(adapted, 80e9, None) == plan_memory(plain, 80e9, None)
    more, less = (plan_memory(one, 80e9, None, on_gpu=False).phases for one in (adapted, plain))
    assert [a.total - b.total for a, b in zip(more, less, strict=True)] == pytest.approx([weights] * len(less))


@pytest.mark.parametrize(("per_node", "machine", "copies"), [(8, "H100-80GB", 8), (4, "H100-80GB", 4), (8, "cpu", 0)])
def test_the_figures_have_a_nodes_copies_of_the_base(per_node: int, machine: str, copies: int) -> None:
    one = replace(job(SEVEN, Layout(8, tp=2)), adapters=True, devices_per_node=per_node)
    on = find_machine(machine)
    memory = plan_memory(one, 80e9, None, on_gpu=not on.is_cpu)
    figures = summarize_step(one, on, memory, step_time(one, on, memory, 3584.0, None), 0)
    assert figures["base_copy_bytes"] == copies * base_copy(one)

"""Time per phase: by hand where that is possible, and never better for having more to do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_tlt.config.layouts import Layout
from megatron_tlt.errors import ConfigError
from megatron_tlt.planning.cost import Workload, layer_time, optimizer_seconds, pass_seconds, step_time
from megatron_tlt.planning.engine_memory import engine_memory
from megatron_tlt.planning.job import Job, Recompute
from megatron_tlt.planning.machine import Machine, find_machine, from_data_sheet, processor, profile_text, read_profile
from megatron_tlt.planning.memory import plan_memory
from megatron_tlt.planning.rollout_time import ResponseLengths, decode_step_seconds, rollout_seconds
from tests.planning.jobs import MOE, SEVEN, job

H100 = from_data_sheet("H100-80GB")
# a machine on which nothing but matrix products takes time
BARE = replace(
    H100,
    matmul=((1, 1e15),),
    attention=1e30,
    memory_bandwidth=1e30,
    node_link=1e30,
    network=1e30,
    collective_latency=((8, 0.0),),
)


def test_products_take_six_operations_per_weight_and_token() -> None:
    one = job(layout=Layout(1), responses=64)
    work = Workload(64, 8192.0, 8192.0)
    seconds = pass_seconds(one, BARE, work, 64, forward_only=False)
    biases = SEVEN.layers * (SEVEN.query + 2 * SEVEN.key)
    assert seconds == pytest.approx(6 * (SEVEN.multiplied - biases) * 64 * 8192 / 1e15, rel=1e-6)
    forward = pass_seconds(one, BARE, work, 64, forward_only=True)
    assert forward == pytest.approx(seconds / 3, rel=1e-6)
    again = replace(one, actor=replace(one.actor, recompute=Recompute("full")))
    layers = 2 * (SEVEN.multiplied - biases - SEVEN.vocabulary) * 64 * 8192 / 1e15
    assert pass_seconds(again, BARE, work, 64, forward_only=False) == pytest.approx(seconds + layers, rel=1e-6)


def test_a_pipeline_has_its_bubble() -> None:
    work = Workload(16, 16384.0 * 0.95, 8192.0)
    alone = pass_seconds(job(layout=Layout(1), responses=16), BARE, work, 16, forward_only=False)
    staged = pass_seconds(job(layout=Layout(4, pp=4), responses=16), BARE, work, 16, forward_only=False)
    assert (16 + 3) / 4 * alone / 16 < staged < 1.5 * (16 + 3) / 4 * alone / 16  # the last stage has the head as well
    halved = pass_seconds(job(layout=Layout(4, pp=4, vpp=7), responses=16), BARE, work, 16, forward_only=False)
    assert halved == pytest.approx(staged * (16 + 3 / 7) / (16 + 3))


def test_processes_on_fewer_cores_take_the_work_of_all() -> None:
    shared = replace(BARE, cores=2)
    work = Workload(16, 16384.0 * 0.95, 8192.0)
    one = job(layout=Layout(1), responses=16)
    alone = pass_seconds(one, shared, work, 16, forward_only=False)
    for layout in (Layout(8), Layout(8, pp=4), Layout(8, tp=4)):
        seconds = pass_seconds(job(layout=layout, responses=16), shared, work, 16, forward_only=False)
        assert seconds == pytest.approx(alone / 2, rel=1e-6)  # two cores, and no bubble


def test_what_moves_takes_time_by_the_link_it_goes_over() -> None:
    inside = layer_time(job(layout=Layout(8, tp=8, sp=True)), H100, 16384, 8192)
    across = layer_time(job(layout=Layout(8, tp=8, sp=True), devices_per_node=4), H100, 16384, 8192)
    assert across.moved_seconds > 4 * inside.moved_seconds > 0
    assert layer_time(job(layout=Layout(8)), H100, 16384, 8192).moved_seconds == 0
    experts = layer_time(job(MOE, Layout(8, ep=8)), H100, 16384, 8192)
    amount = 2 * 16384 * 8 * 2048 * 2 * 7 / 8
    assert experts.moved_seconds == pytest.approx(amount / H100.node_link + 2 * H100.latency(8))
    # sequence parallelism waits for a gather and a scatter where there was one sum; the bytes are the same
    waits = replace(BARE, collective_latency=((2, 1.0), (8, 3.0)))
    moved = [layer_time(job(layout=Layout(8, tp=8, sp=sp)), waits, 16384, 8192).moved_seconds for sp in (False, True)]
    assert moved == pytest.approx([2 * 3.0, 4 * 3.0])
    hidden = job(layout=Layout(16), overlap=True)
    assert optimizer_seconds(hidden, H100) < optimizer_seconds(job(layout=Layout(16)), H100)


def test_a_group_takes_the_network_as_soon_as_it_needs_two_nodes() -> None:
    apart = replace(H100, node_link=3.0, network=2.0)
    assert [apart.link(ranks, 8) for ranks in (1, 8, 9, 64)] == [3.0, 3.0, 2.0, 2.0]
    # only the groups that span nodes get slower with the network
    fast, slow = (replace(H100, network=rate) for rate in (H100.network, H100.network / 10))
    for layout, per_node, spans in ((Layout(16, tp=8), 8, True), (Layout(16, tp=8), 16, False), (Layout(8), 8, False)):
        one = job(layout=layout, devices_per_node=per_node)
        assert (optimizer_seconds(one, slow) > optimizer_seconds(one, fast)) is spans


def test_a_step_touches_state_as_often_as_its_optimizer_does_and_clears_gradients() -> None:
    slow = replace(BARE, memory_bandwidth=1e9)
    weights, cleared = SEVEN.parameters / 1e9, 4 + 2
    fused = optimizer_seconds(job(layout=Layout(1)), slow)
    assert fused == pytest.approx(weights * (2 * (12 + 4) + cleared), rel=1e-3)
    one = job(layout=Layout(1))
    plain = optimizer_seconds(replace(one, actor=replace(one.actor, fused=False)), slow)
    assert plain == pytest.approx(weights * (9 * (12 + 4) + cleared), rel=1e-3)
    # each of eight ranks has an eighth of the state, and all gradients
    assert optimizer_seconds(job(layout=Layout(8)), slow) == pytest.approx(weights * (2 * 16 / 8 + cleared), rel=1e-3)


def test_gloo_reduces_everything_everywhere() -> None:
    linked = replace(BARE, node_link=1e9)
    amount = SEVEN.parameters * 7 / 8 / 1e9
    assert optimizer_seconds(job(layout=Layout(8)), linked) == pytest.approx(amount * (4 + 2), rel=1e-3)
    on_cores = optimizer_seconds(job(layout=Layout(8)), replace(linked, cores=2))
    assert on_cores == pytest.approx(4 * amount * (2 * 4 + 2), rel=1e-3)


def test_gradients_of_each_micro_batch_are_added_up() -> None:
    slow, work = replace(BARE, memory_bandwidth=1e9), Workload(4, 16384.0 * 0.95, 8192.0)

    def seconds(gradient_bytes: int, sequences: int) -> float:
        one = job(layout=Layout(1), responses=sequences, gradient_bytes=gradient_bytes)
        return pass_seconds(one, slow, work, sequences, forward_only=False)

    for sequences in (1, 4):
        more = seconds(8, sequences) - seconds(4, sequences)
        assert more == pytest.approx(sequences * 2 * 4 * SEVEN.parameters / 1e9, rel=1e-3)


def test_a_decode_step_reads_weights_and_caches() -> None:
    one, machine = job(), replace(H100, decode_overhead=0.0)
    engine = engine_memory(one, None)
    read = one.model.touched(8.0) / one.engine.tp * 2 + 8 * 1000 * engine.cache_token
    assert decode_step_seconds(one, machine, engine, 8, 1000, False) == pytest.approx(read / machine.memory_bandwidth)
    few, many = (decode_step_seconds(job(MOE), machine, engine_memory(job(MOE), None), n, 1, False) for n in (1, 64))
    assert many > 5 * few  # experts that nobody chose are not read


def test_a_rollout_by_hand() -> None:
    one = job(layout=Layout(1), responses=4, prompt_tokens=1)
    flat = ResponseLengths(mean=100.0, longest=100, spread=1e-9)
    engine = engine_memory(one, None)
    fast = replace(BARE, matmul=((1, 1e30),), decode_overhead=0.01)
    assert rollout_seconds(one, fast, engine, 1e9, flat) == pytest.approx(1.0, rel=1e-3)
    two_at_a_time = replace(one, engine=replace(one.engine, max_sequences=2))
    assert rollout_seconds(two_at_a_time, fast, engine, 1e9, flat) == pytest.approx(2.0, rel=1e-3)
    assert rollout_seconds(one, fast, engine, 220, flat) == pytest.approx(2.0, rel=1e-3)  # no room for more than two


@settings(max_examples=40)
@given(st.floats(20, 14336), st.integers(1, 300))
def test_lengths_keep_their_mean_and_their_bound(mean: float, count: int) -> None:
    found = ResponseLengths(mean, 14336, 0.9).quantiles(count)
    assert list(found) == sorted(found) and len(found) == count and max(found) <= 14336
    if mean < 5000 and count > 50:
        assert sum(found) / count == pytest.approx(mean, rel=0.02)


@settings(max_examples=25)
@given(
    st.sampled_from(["H100-80GB", "A100-80GB", "cpu"]),
    st.sampled_from([Layout(8), Layout(8, tp=4, sp=True), Layout(8, pp=4)]),
)
def test_more_work_takes_longer(device: str, layout: Layout) -> None:
    machine = processor(2, 24e9) if device == "cpu" else find_machine(device)

    def total(one: Job) -> float:
        return step_time(one, machine, plan_memory(one, 1e12, None), 3584.0, None).total

    one = job(layout=layout, responses=64)
    assert total(replace(one, responses=256)) > total(one) > 0
    assert total(replace(one, model=replace(SEVEN, layers=56))) > total(one)
    assert total(replace(one, reference=True)) > total(one)


def test_a_profile_is_read_back_and_a_wrong_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    machine: Machine = replace(processor(2, 24e9), name="here", source="measured")
    path.write_text(profile_text(machine))
    assert read_profile(path) == find_machine(str(path)) == machine
    values = json.loads(path.read_text())
    path.write_text(
        json.dumps({**values, "attention": -1, "speed": 3, "matmul": [[64, 1], [8, 2]], "collective_latency": 1})
    )
    with pytest.raises(ConfigError) as caught:
        read_profile(path)
    lines = str(caught.value)
    assert "attention: found -1; allowed: a number above 0" in lines and "speed: unknown key" in lines
    assert "matmul: found [[64, 1], [8, 2]]; allowed: [smallest side, rate] pairs, ascending" in lines
    assert "collective_latency: found 1; allowed: [ranks, seconds] pairs, ascending" in lines
    with pytest.raises(ConfigError, match="'H1000'; allowed: A100-40GB"):
        find_machine("H1000")


def test_products_between_measured_sizes_are_interpolated() -> None:
    machine = replace(H100, matmul=((64, 1e9), (1024, 3e9)))
    assert machine.matmul_rate(8) == 1e9 and machine.matmul_rate(4096) == 3e9
    assert machine.matmul_rate(256) == pytest.approx(2e9)
    waiting = replace(H100, collective_latency=((2, 1e-3), (8, 3e-3)))
    assert [waiting.latency(ranks) for ranks in (1, 2, 4, 8, 64)] == pytest.approx([1e-3, 1e-3, 2e-3, 3e-3, 3e-3])

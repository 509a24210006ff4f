"""What optimizers keep, by their options and by running them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_tlt.config.layouts import Layout
from megatron_tlt.config.schema import ActorConfig
from megatron_tlt.planning.actor_memory import stage_memory
from megatron_tlt.planning.cost import optimizer_seconds
from megatron_tlt.planning.machine import find_machine
from megatron_tlt.planning.optimizer_state import OptimizerMemory, optimizer_memory
from megatron_tlt.planning.snapshots import snapshot_bytes
from tests.planning.jobs import job

MUON = {
    "optimizer": {"optimizer": "torch.optim.Muon"},
    "optimizer_split": {"lr": 1e-3},
}


@pytest.mark.parametrize(
    ("given", "bf16", "state_bytes", "owned"),
    [
        ({}, True, 12, "slices"),
        ({}, False, 8, "slices"),
        ({"optimizer": {"optimizer": "sgd"}}, True, 8, "slices"),
        ({"optimizer": {"optimizer": "torch.optim.Adagrad"}}, True, 8, "slices"),
        ({"optimizer": {"optimizer": "torch.optim.AdamW"}, "optimizer_sharding": "tensor"}, True, 16, "tensors"),
        (MUON, True, 0.9 * 12 + 0.1 * 16, "tensors"),
        ({"optimizer": {"optimizer": "sgd"}, "optimizer_sharding": "tensor"}, False, 12, "tensors"),
        ({"optimizer": {"optimizer": "tests.helpers.coupled_optimizer.CoupledRnn"}}, True, 16, "all"),
    ],
)
def test_bytes_per_weight(given: dict[str, Any], bf16: bool, state_bytes: float, owned: str) -> None:
    found = optimizer_memory(ActorConfig.model_validate({"transformer_impl": "local", **given}), bf16, outside=0.1)
    assert found.state_bytes == pytest.approx(state_bytes, rel=0.01)
    assert found.owned == owned


def test_a_step_of_a_learned_optimizer_holds_its_features() -> None:
    learned = {"optimizer": {"optimizer": "megatron_tlt.bench.learned_optimizer.FactoredMlp"}}
    found = optimizer_memory(ActorConfig.model_validate({"transformer_impl": "local", **learned}), True, 0.1)
    assert 13 * 4 < found.step_bytes < 100 * 4, "13 features of four bytes, and what is made of them"


def test_a_class_that_cannot_run_here_is_not_taken_silently_for_another() -> None:
    given = {"optimizer": {"optimizer": "tests.optim.test_whole_tensor.NoHub"}}
    found = optimizer_memory(ActorConfig.model_validate({"transformer_impl": "local", **given}), True, 0.1)
    assert found.state_bytes == 12 and "cannot reach the hub" in found.unknown


def test_the_owner_of_the_largest_tensor_is_the_fullest() -> None:
    base = job(layout=Layout(128, tp=4))
    actor = replace(base.actor, optimizer=OptimizerMemory(16, "tensors"), largest_tensor=10**9)
    assert stage_memory(replace(base, actor=actor))[0].optimizer == 16e9
    actor = replace(actor, optimizer=OptimizerMemory(16, "tensors", 10.0, 4.0), largest_stepped=10**8)
    assert stage_memory(replace(base, actor=actor))[0].optimizer == 16e9 + 4e9, "the split's step on the embedding"


def test_one_owner_takes_longer_than_many() -> None:
    base, machine = job(), find_machine("H100-80GB")

    def seconds(owned: Any) -> float:
        actor = replace(base.actor, optimizer=OptimizerMemory(16, owned), largest_tensor=10**8)
        return optimizer_seconds(replace(base, actor=actor), machine)

    assert seconds("slices") < seconds("tensors") < seconds("all")


def test_who_owns_what_decides_where_the_bytes_are() -> None:
    base = job(layout=Layout(8, tp=2, pp=2))
    weights = base.model.parameters

    def stages(owned: Any) -> list[float]:
        actor = replace(base.actor, optimizer=OptimizerMemory(16, owned))
        return [stage.optimizer for stage in stage_memory(replace(base, actor=actor))]

    assert stages("tensors") == pytest.approx([2 * weights] * 2), "an eighth of 16 bytes each"
    assert stages("all") == pytest.approx([16 * weights, 0])
    assert sum(stages("slices")) * 4 == pytest.approx(16 * weights, rel=0.06), "four ranks in each stage"


def test_snapshots_by_hand() -> None:
    one = job(layout=Layout(8, tp=4, sp=True), optimizer=OptimizerMemory(12))
    # each of eight ranks a quarter of the weights, an eighth of the optimizer, in two slots
    expected = 8 * 2 * one.model.parameters * (2 / 4 + 12 / 8)
    assert snapshot_bytes(one) == pytest.approx(expected, rel=0.01)
    assert snapshot_bytes(replace(one, devices_per_node=4)) == pytest.approx(expected, rel=0.01), "four, each twice"
    whole = job(layout=Layout(1), bf16=False, optimizer=OptimizerMemory(8))
    assert snapshot_bytes(whole) == pytest.approx(2 * whole.model.parameters * 16, rel=0.01)

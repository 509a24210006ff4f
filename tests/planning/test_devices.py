"""Data sheets of devices, and the kind of device that a config runs on."""

from __future__ import annotations

import pytest

from megatron_tlt.cli.planned import machine_of
from megatron_tlt.config.loader import load_config
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.config.shipped import shipped
from megatron_tlt.errors import ConfigError
from megatron_tlt.planning.devices import device, known_devices, runs_on_gpu
from megatron_tlt.planning.job import job_of
from tests.helpers.launch import REPOSITORY


def test_figures_are_in_bytes_and_operations_per_second() -> None:
    h100 = device("H100-80GB")
    assert (h100.memory_bytes, h100.flops, h100.memory_bandwidth) == (80e9, 989e12, 3350e9)
    for known in known_devices().values():
        assert known.memory_bytes < known.memory_bandwidth < known.flops
        assert 0 < known.node_bandwidth < known.memory_bandwidth


def test_an_unknown_device_is_named_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match="'H1000'; allowed: A100-40GB"):
        device("H1000")


def config_of(name: str, *overrides: str) -> TltConfig:
    fetched = ["model.recipe.base=null"] if "smollm2" in name else []  # a recipe's own small model stands for it
    return load_config(shipped()[name], [*fetched, *overrides], check_libraries=False)


@pytest.fixture(params=[0, 8])
def gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """GPUs of this machine."""
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr("megatron_tlt.planning.devices.visible_gpus", lambda: request.param)
    monkeypatch.setattr("megatron_tlt.cli.planned.PROFILE", REPOSITORY / "no-profile.json")
    found: int = request.param
    return found


@pytest.mark.parametrize("name", shipped())
def test_a_shipped_config_is_planned_for_its_kind_of_device(name: str, gpus: int) -> None:
    """Without a GPU on this machine for the one that the name says; with GPUs for them, as ranks take them."""
    config = config_of(name)
    on_gpu = name.endswith("8g") or gpus > 0
    assert runs_on_gpu(config) == on_gpu
    assert machine_of(config, None).is_cpu != on_gpu
    assert machine_of(config, "cpu").is_cpu and not machine_of(config, "A100-80GB").is_cpu
    assert job_of(config).actor.fused_activation == on_gpu, "Megatron's default"
    assert not job_of(config, on_gpu=False).actor.fused_activation


@pytest.mark.parametrize(
    ("overrides", "on_gpu"),
    [
        (["actor.megatron.bf16=true", "rollout.vllm.dtype=bfloat16"], False),  # as a CPU with AMX may
        (["actor.megatron.bf16=true", "rollout.vllm={dtype: bfloat16}"], True),
        (["rollout.vllm.gpu_memory_utilization=0.5"], True),
        (["rollout.cuda_graphs=piecewise"], True),
        (["actor.transformer_impl=transformer_engine"], True),
    ],
)
def test_a_key_for_gpus_decides_where_there_are_none(
    overrides: list[str], on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_tlt.planning.devices.visible_gpus", lambda: 0)
    assert runs_on_gpu(config_of("quickstart-deterministic", *overrides)) == on_gpu


def test_megatrons_own_key_decides_on_the_activation() -> None:
    config = config_of("qwen3-4b-1n8g", "actor.megatron.bias_activation_fusion=false")
    assert not job_of(config, on_gpu=True).actor.fused_activation

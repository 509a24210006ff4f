"""Peak figures of devices, from their data sheets, and the kind of device that a config is for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import yaml

from megatron_tlt.config.schema import TltConfig, visible_gpus
from megatron_tlt.errors import ConfigError

DEFAULT_DEVICE = "H100-80GB"
"""Default device of a plan or a simulation."""


@dataclass(frozen=True)
class DeviceSpec:
    """Figures of one device."""

    name: str
    memory_bytes: float
    flops: float
    """Dense bfloat16 operations per second."""
    memory_bandwidth: float
    """Bytes per second."""
    node_bandwidth: float
    """Bytes per second and direction to the other devices of its node."""

    @classmethod
    def of_sheet(cls, name: str, row: Mapping[str, Any]) -> DeviceSpec:
        """From a row in the units of ``devices.yaml``: GB, TFLOP/s, GB/s."""
        rates = (row[key] * 1e9 for key in ("memory_bandwidth", "node_bandwidth"))
        return cls(name, row["memory"] * 1e9, row["tflops"] * 1e12, *rates)


@cache
def known_devices() -> dict[str, DeviceSpec]:
    """The devices of ``devices.yaml`` by name."""
    text = resources.files("megatron_tlt.planning").joinpath("devices.yaml").read_text()
    return {name: DeviceSpec.of_sheet(name, row) for name, row in yaml.safe_load(text).items()}


def device(name: str) -> DeviceSpec:
    """Looks up a known device; raises ConfigError if there is none of that name."""
    try:
        return known_devices()[name]
    except KeyError:
        raise ConfigError(f"device: found {name!r}; allowed: {', '.join(sorted(known_devices()))}") from None


def runs_on_gpu(config: TltConfig) -> bool:
    """Whether a run of the config computes on GPUs, as far as this machine and the config tell.

    Ranks take the GPUs that they find. A machine without any (a login node) may plan a run for others: then those keys
    decide that a CPU refuses or ignores. bfloat16, which some CPUs compute too, counts unless the KV cache has a fixed
    number of blocks, as configs for CPUs set it. ``transformer_impl: local`` runs on both.
    """
    if visible_gpus():
        return True
    actor, rollout = config.actor, config.rollout
    if actor.transformer_impl == "transformer_engine" or "gpu_memory_utilization" in rollout.vllm:
        return True
    if rollout.cuda_graphs != "auto" or rollout.model_runner == "v2":
        return True
    return actor.megatron.get("bf16") is True and rollout.vllm.get("num_gpu_blocks_override") is None

"""Peak figures of devices, from their data sheets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import yaml

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

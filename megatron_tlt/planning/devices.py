"""Peak figures of devices, from their data sheets."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources

import yaml

from megatron_tlt.errors import ConfigError

DEFAULT_DEVICE = "H100-80GB"
"""Default device of a plan or a simulation."""


@dataclass(frozen=True)
class DeviceSpec:
    """Figures of one device; ``devices.yaml`` uses human-readable units."""

    name: str
    memory_bytes: float
    flops: float
    """Dense bfloat16 operations per second."""
    memory_bandwidth: float
    """Bytes per second."""
    node_bandwidth: float
    """Bytes per second and direction to the other devices of its node."""


@cache
def known_devices() -> dict[str, DeviceSpec]:
    """The devices of ``devices.yaml`` by name."""
    text = resources.files("megatron_tlt.planning").joinpath("devices.yaml").read_text()
    return {
        name: DeviceSpec(
            name,
            memory_bytes=row["memory"] * 1e9,
            flops=row["tflops"] * 1e12,
            memory_bandwidth=row["memory_bandwidth"] * 1e9,
            node_bandwidth=row["node_bandwidth"] * 1e9,
        )
        for name, row in yaml.safe_load(text).items()
    }


def device(name: str) -> DeviceSpec:
    """Looks up a known device.

    Raises:
        ConfigError: there is no device of that name.
    """
    try:
        return known_devices()[name]
    except KeyError:
        raise ConfigError(f"device: found {name!r}; allowed: {', '.join(sorted(known_devices()))}") from None

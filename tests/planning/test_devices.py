"""Data sheets of devices."""

from __future__ import annotations

import pytest

from megatron_tlt.errors import ConfigError
from megatron_tlt.planning.devices import device, known_devices


def test_figures_are_in_bytes_and_operations_per_second() -> None:
    h100 = device("H100-80GB")
    assert (h100.memory_bytes, h100.flops, h100.memory_bandwidth) == (80e9, 989e12, 3350e9)
    for known in known_devices().values():
        assert known.memory_bytes < known.memory_bandwidth < known.flops
        assert 0 < known.node_bandwidth < known.memory_bandwidth


def test_an_unknown_device_is_named_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match="'H1000'; allowed: A100-40GB"):
        device("H1000")

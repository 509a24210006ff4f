"""The simulation's constants with their sources."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from typing import Any

import yaml

from megatron_tlt.planning import machine


@dataclass(frozen=True)
class Constants:
    """See ``constants.yaml``, which explains each; seconds, bytes per second, fractions, tokens."""

    memory_efficiency: float
    node_link_efficiency: float
    network_bandwidth: float
    network_efficiency: float
    compute_efficiency: float
    all_reduce_latency_s: float
    step_overhead_s: float
    draft_overhead_s: float
    wake_bandwidth: float
    aligned_acceptance: float
    cold_acceptance: float
    candidates_exponent: float
    model_free_acceptance: float
    drafter_steps_to_align: float
    updates_to_drift: float
    group_correlation: float
    length_median: float
    length_sigma: float
    training_efficiency: float


@cache
def documented() -> dict[str, dict[str, Any]]:
    """Name to value, kind and source; for constants shared by all plans, value and source come from their table."""
    text = resources.files("megatron_tlt.planning.simulation").joinpath("constants.yaml").read_text("utf-8")
    found: dict[str, dict[str, Any]] = yaml.safe_load(text)
    for entry in found.values():
        if "from" in entry:
            section, name = entry.pop("from").split(".")
            entry |= machine.documented()[section][name]
    return found


@cache
def shipped() -> Constants:
    """The constants of the data file."""
    return Constants(**{field.name: float(documented()[field.name]["value"]) for field in fields(Constants)})


def of_kind(kind: str) -> Iterator[str]:
    """Names of the constants that are ``assumed``, ``published``, ``measured``, ``derived`` or ``fitted``."""
    return (name for name, entry in documented().items() if entry["kind"] == kind)

"""Unequal devices and the links between them: a YAML file to plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from megatron_tlt.config import violations
from megatron_tlt.config.section import Fraction, NonNegativeFloat, PositiveInt, Section
from megatron_tlt.config.source import read_yaml
from megatron_tlt.errors import ConfigError
from megatron_tlt.planning.devices import Device, known_devices

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class DeviceSection(Section):
    """Figures of a device that ``devices.yaml`` lacks: GB, TFLOP/s in bf16, GB/s, GB/s per direction inside a node."""

    name: str = Field(min_length=1)
    memory: Positive
    tflops: Positive
    memory_bandwidth: Positive
    node_bandwidth: Positive


class HeldSection(Section):
    """So many devices of one kind in a node."""

    device: str
    count: PositiveInt


class NodeSection(Section):
    """``count`` equal nodes, called ``name`` or, of several, ``name-0``, ``name-1`` and so on."""

    name: str = Field(min_length=1)
    count: PositiveInt = 1
    devices: list[HeldSection] = Field(min_length=1)


class LinkSection(Section):
    """Between nodes whose names match the two patterns (``*`` and ``?``); later links replace earlier ones.

    ``bandwidth`` in GB/s is what one device reaches in one direction: of a card that eight share, an eighth.
    """

    between: list[str] = Field(min_length=2, max_length=2)
    latency_us: NonNegativeFloat
    bandwidth: Positive


class EfficiencySection(Section):
    """What of the data sheets' figures is reached; assumptions until measured."""

    compute: Fraction = 0.4
    memory: Fraction = 0.7
    network: Fraction = 0.8
    usable_memory: Fraction = 0.9


class ClusterSection(Section):
    """A whole file."""

    devices: list[DeviceSection] = Field(default_factory=list)
    nodes: list[NodeSection] = Field(min_length=1)
    links: list[LinkSection] = Field(default_factory=list)
    node_latency_us: NonNegativeFloat = 5.0
    host_bandwidth: Positive = 25.0
    efficiency: EfficiencySection = EfficiencySection()


@dataclass(frozen=True)
class Cluster:
    """Devices by number, in the order of the nodes; figures are those reached, efficiencies included.

    Devices of one class (equal figures, one node) are interchangeable: no cost depends on which of them is meant.
    """

    devices: tuple[Device, ...]
    node_of: tuple[int, ...]
    nodes: tuple[str, ...]
    latency: tuple[tuple[float, ...], ...]
    """Seconds, node to node; inside a node on the diagonal."""
    bandwidth: tuple[tuple[float, ...], ...]
    """Bytes per second and device, node to node; the diagonal is not used: a device has its own figure."""
    host_bandwidth: float
    """Bytes per second between a device and its host's memory."""

    @cached_property
    def classes(self) -> tuple[tuple[Device, int], ...]:
        """Device and node of each class."""
        return tuple(dict.fromkeys(zip(self.devices, self.node_of, strict=True)))

    @cached_property
    def class_of(self) -> tuple[int, ...]:
        number = {entry: index for index, entry in enumerate(self.classes)}
        return tuple(number[entry] for entry in zip(self.devices, self.node_of, strict=True))

    @property
    def size(self) -> int:
        return len(self.devices)

    def label(self, device: int) -> str:
        """Such as ``a100-0:3``: the node, and the number inside it."""
        node = self.node_of[device]
        return f"{self.nodes[node]}:{device - self.node_of.index(node)}"

    def summary(self) -> str:
        """Such as ``16 A100-80GB, 24 L40S-48GB``."""
        return ", ".join(f"{count} {name}" for name, count in Counter(d.name for d in self.devices).items())


def read_cluster(path: Path | str) -> Cluster:
    """Reads a cluster's file.

    Raises:
        ConfigError: with one line per violation, each naming file, key, what was found and what is allowed.
    """
    path = Path(path)
    try:
        section = ClusterSection.model_validate(read_yaml(path))
    except ValidationError as error:
        raise ConfigError("\n".join(f"{path}: {line}" for line in violations.lines(ClusterSection, error))) from None
    try:
        return build_cluster(section)
    except ConfigError as error:
        raise ConfigError("\n".join(f"{path}: {line}" for line in str(error).splitlines())) from None


def build_cluster(section: ClusterSection) -> Cluster:
    """Raises ConfigError where a device is unknown, a name is taken, or two nodes have no link."""
    known = known_devices() | {
        own.name: Device(
            own.name, own.memory * 1e9, own.tflops * 1e12, own.memory_bandwidth * 1e9, own.node_bandwidth * 1e9
        )
        for own in section.devices
    }
    problems, names, devices, node_of = [], [], [], []
    reached = section.efficiency
    for index, entry in enumerate(section.nodes):
        for name in [entry.name] if entry.count == 1 else [f"{entry.name}-{n}" for n in range(entry.count)]:
            if name in names:
                problems.append(f"nodes.{index}.name: {name!r} is there already")
            names.append(name)
            for held, one in enumerate(entry.devices):
                if one.device not in known:
                    allowed = ", ".join(sorted(known))
                    problems.append(f"nodes.{index}.devices.{held}.device: found {one.device!r}; allowed: {allowed}")
                    continue
                sheet = known[one.device]
                device = Device(
                    sheet.name,
                    sheet.memory_bytes * reached.usable_memory,
                    sheet.flops * reached.compute,
                    sheet.memory_bandwidth * reached.memory,
                    sheet.node_bandwidth * reached.network,
                )
                devices += [device] * one.count
                node_of += [len(names) - 1] * one.count
    latency, bandwidth = _links(section, names, problems)
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    host = section.host_bandwidth * 1e9 * reached.network
    return Cluster(tuple(devices), tuple(node_of), tuple(names), latency, bandwidth, host)


Matrix = tuple[tuple[float, ...], ...]


def _links(section: ClusterSection, names: Sequence[str], problems: list[str]) -> tuple[Matrix, Matrix]:
    inside = section.node_latency_us * 1e-6
    latency = [[inside] * len(names) for _ in names]
    bandwidth = [[0.0] * len(names) for _ in names]
    for index, link in enumerate(section.links):
        one, other = ([n for n, name in enumerate(names) if fnmatchcase(name, p)] for p in link.between)
        for pattern, found in zip(link.between, (one, other), strict=True):
            if not found:
                problems.append(f"links.{index}.between: {pattern!r} matches no node; nodes: {', '.join(names)}")
        for a, b in ((a, b) for a in one for b in other if a != b):
            latency[a][b] = latency[b][a] = link.latency_us * 1e-6
            bandwidth[a][b] = bandwidth[b][a] = link.bandwidth * 1e9 * section.efficiency.network
    missing = [(names[a], names[b]) for a in range(len(names)) for b in range(a) if not bandwidth[a][b]]
    if missing:
        pair = " and ".join(reversed(missing[0]))
        more = f" (and {len(missing) - 1} other pairs)" if len(missing) > 1 else ""
        problems.append(f"links: none between {pair}{more}; for all pairs: between: ['*', '*']")
    return tuple(map(tuple, latency)), tuple(map(tuple, bandwidth))

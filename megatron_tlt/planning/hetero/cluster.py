"""Unequal devices and the links between them, read from a YAML file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from megatron_tlt.config import violations
from megatron_tlt.config.section import Fraction, NonNegativeFloat, PositiveInt, Section
from megatron_tlt.config.shipped import find_config
from megatron_tlt.config.source import read_yaml
from megatron_tlt.errors import ConfigError
from megatron_tlt.planning.devices import DeviceSpec, known_devices
from megatron_tlt.planning.machine import constants, read_profile

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class DeviceSection(Section):
    """A device that ``devices.yaml`` lacks: GB, TFLOP/s in bf16, GB/s, GB/s per direction inside a node."""

    name: str = Field(min_length=1)
    memory: Positive
    tflops: Positive
    memory_bandwidth: Positive
    node_bandwidth: Positive


class HeldSection(Section):
    """``count`` devices of one kind in a node."""

    device: str
    count: PositiveInt


class NodeSection(Section):
    """``count`` equal nodes, named ``name`` or, if several, ``name-0``, ``name-1`` and so on."""

    name: str = Field(min_length=1)
    count: PositiveInt = 1
    devices: list[HeldSection] = Field(min_length=1)


class LinkSection(Section):
    """Links between nodes whose names match the two patterns (``*`` and ``?``); later links replace earlier ones.

    ``bandwidth`` in GB/s is what one device reaches in one direction: an eighth of a network card shared by eight.
    """

    between: list[str] = Field(min_length=2, max_length=2)
    latency_us: NonNegativeFloat
    bandwidth: Positive


def _assumed(name: str, section: str = "time") -> Any:
    return Field(default_factory=lambda: constants()[section][name])


class EfficiencySection(Section):
    """Achieved fractions of the data sheets' figures; the defaults are those of ``constants.yaml`` for all plans."""

    compute: Fraction = _assumed("matmul")
    memory: Fraction = _assumed("memory_bandwidth")
    node_link: Fraction = _assumed("node_link")
    network: Fraction = _assumed("network_efficiency")
    """For links between nodes."""
    usable_memory: Fraction = _assumed("usable", "memory")


class ClusterSection(Section):
    """A whole file."""

    devices: list[DeviceSection] = Field(default_factory=list)
    nodes: list[NodeSection] = Field(min_length=1)
    links: list[LinkSection] = Field(default_factory=list)
    node_latency_us: NonNegativeFloat = 5.0
    host_bandwidth: Positive = Field(default_factory=lambda: constants()["time"]["host_link"] / 1e9)
    """Achieved GB/s between a device and its host's memory."""
    efficiency: EfficiencySection = Field(default_factory=EfficiencySection)
    profiles: dict[str, Path] = Field(default_factory=dict)
    """Profiles of ``tlt plan --profile`` by device name; their rates replace those of the data sheet.

    Paths are relative to the file's folder.
    """


@dataclass(frozen=True)
class Cluster:
    """Devices by number, in the order of the nodes; figures are achieved ones, including efficiencies.

    Devices of one class (equal figures, one node) are interchangeable: no cost depends on which one is used.
    """

    devices: tuple[DeviceSpec, ...]
    node_of: tuple[int, ...]
    nodes: tuple[str, ...]
    latency: tuple[tuple[float, ...], ...]
    """Seconds, node to node; the diagonal is inside a node."""
    bandwidth: tuple[tuple[float, ...], ...]
    """Bytes per second and device, node to node; the diagonal is unused: each device has its own figure."""
    host_bandwidth: float
    """Bytes per second between a device and its host's memory."""

    @cached_property
    def classes(self) -> tuple[tuple[DeviceSpec, int], ...]:
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
        """For instance ``a100-0:3``: the node, and the index inside it."""
        node = self.node_of[device]
        return f"{self.nodes[node]}:{device - self.node_of.index(node)}"

    def summary(self) -> str:
        """For instance ``16 A100-80GB, 24 L40S-48GB``."""
        return ", ".join(f"{count} {name}" for name, count in Counter(d.name for d in self.devices).items())


def read_cluster(path: Path | str) -> Cluster:
    """Reads a cluster file, or the shipped one of this name.

    Raises:
        ConfigError: one line per violation, each with file, key, value found and values allowed.
    """
    path = find_config(Path(path), "clusters")
    try:
        section = ClusterSection.model_validate(read_yaml(path))
    except ValidationError as error:
        raise ConfigError("\n".join(f"{path}: {line}" for line in violations.lines(ClusterSection, error))) from None
    try:
        return build_cluster(section, path.parent)
    except ConfigError as error:
        raise ConfigError("\n".join(f"{path}: {line}" for line in str(error).splitlines())) from None


def build_cluster(section: ClusterSection, folder: Path = Path()) -> Cluster:
    """Builds the cluster; profile paths are relative to ``folder``.

    Raises:
        ConfigError: an unknown device, a duplicate name, two nodes without a link, or a profile that is not of a
            device.
    """
    problems: list[str] = []
    known = _reached(section, folder, problems)
    names: list[str] = []
    devices, node_of = [], []
    for index, entry in enumerate(section.nodes):
        for name in [entry.name] if entry.count == 1 else [f"{entry.name}-{n}" for n in range(entry.count)]:
            if name in names:
                problems.append(f"nodes.{index}.name: {name!r} exists already")
            names.append(name)
            for held, one in enumerate(entry.devices):
                if one.device not in known:
                    allowed = ", ".join(sorted(known))
                    problems.append(f"nodes.{index}.devices.{held}.device: found {one.device!r}; allowed: {allowed}")
                    continue
                devices += [known[one.device]] * one.count
                node_of += [len(names) - 1] * one.count
    latency, bandwidth = _links(section, names, problems)
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    return Cluster(tuple(devices), tuple(node_of), tuple(names), latency, bandwidth, section.host_bandwidth * 1e9)


def _reached(section: ClusterSection, folder: Path, problems: list[str]) -> dict[str, DeviceSpec]:
    """Every device that a node may name, with its achieved figures: a fraction of the data sheet's, or measured."""
    share = section.efficiency
    sheets = known_devices() | {own.name: DeviceSpec.of_sheet(own.name, own.model_dump()) for own in section.devices}
    known = {
        name: DeviceSpec(
            name,
            sheet.memory_bytes * share.usable_memory,
            sheet.flops * share.compute,
            sheet.memory_bandwidth * share.memory,
            sheet.node_bandwidth * share.node_link,
        )
        for name, sheet in sheets.items()
    }
    for name, path in section.profiles.items():
        if name not in known:
            problems.append(f"profiles: found {name!r}; allowed: {', '.join(sorted(known))}")
            continue
        try:
            machine = read_profile(folder / path)
        except ConfigError as error:
            problems += [f"profiles.{name}: {line}" for line in str(error).splitlines()]
            continue
        if machine.is_cpu:
            problems.append(f"profiles.{name}: {path} is the profile of a processor; allowed: a profile of a device")
        # use the largest products' rate: micro-batches have thousands of tokens
        flops = machine.matmul[-1][1]
        memory = machine.memory_bytes * share.usable_memory
        known[name] = DeviceSpec(name, memory, flops, machine.memory_bandwidth, machine.node_link)
    return known


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

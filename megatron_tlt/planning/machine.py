"""Achieved figures of a plan's machine, from data sheets and assumptions or from a profile; pure."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from megatron_tlt.errors import ConfigError
from megatron_tlt.observe.environment import describe_environment
from megatron_tlt.planning.devices import device, known_devices

CPU = "cpu"
_POINTS = {"matmul": "smallest side, rate", "collective_latency": "ranks, seconds"}


@cache
def documented() -> dict[str, dict[str, dict[str, Any]]]:
    """``constants.yaml``: value and source by section and name."""
    text = resources.files("megatron_tlt.planning").joinpath("constants.yaml").read_text(encoding="utf-8")
    loaded: dict[str, dict[str, dict[str, Any]]] = yaml.safe_load(text)
    return loaded


@cache
def constants() -> dict[str, dict[str, float]]:
    """The values of ``constants.yaml`` by section and name."""
    return {
        section: {name: float(entry["value"]) for name, entry in entries.items()}
        for section, entries in documented().items()
    }


@dataclass(frozen=True)
class Machine:
    """Achieved figures of devices; rates are per device, in bytes or operations per second.

    ``matmul`` maps a matrix's smallest side to the rate of products of that size; sizes between are interpolated.
    ``collective_latency`` likewise maps a number of ranks to the seconds of a small all-reduce among them. ``cores`` is
    the number of processor cores if processes share them. Then a step takes the work of all processes, including data
    movement, divided by the cores, and waiting costs nothing. Its rates are those of a process with its own core.
    """

    name: str
    memory_bytes: float
    matmul: tuple[tuple[int, float], ...]
    attention: float
    memory_bandwidth: float
    node_link: float
    network: float
    collective_latency: tuple[tuple[int, float], ...]
    host_link: float
    decode_overhead: float
    overlap: float
    cores: int | None = None
    source: str = "data sheets and assumptions"

    @property
    def is_cpu(self) -> bool:
        return self.cores is not None

    def matmul_rate(self, smallest_side: float) -> float:
        """Operations per second of a matrix product, by its smallest side (log-linear interpolation)."""
        return _between(self.matmul, smallest_side)

    def latency(self, ranks: int) -> float:
        """Seconds of a collective among ``ranks`` ranks without its bytes (log-linear interpolation)."""
        return _between(self.collective_latency, ranks)

    def link(self, ranks: int, devices_per_node: int) -> float:
        """Bytes per second and device in a group of ``ranks`` that fill nodes: the network's if it needs two."""
        return self.node_link if ranks <= devices_per_node else self.network

    def sharing(self, processes: int) -> float:
        """Number of processes per core; 1 if each has a device."""
        return max(1.0, processes / self.cores) if self.cores is not None else 1.0


def from_data_sheet(name: str) -> Machine:
    """A known device under the assumptions of ``constants.yaml``; raises ConfigError if there is none of that name."""
    sheet, time = device(name), constants()["time"]
    return Machine(
        name=name,
        memory_bytes=sheet.memory_bytes,
        matmul=((1, time["matmul"] * sheet.flops),),
        attention=time["attention"] * sheet.flops,
        memory_bandwidth=time["memory_bandwidth"] * sheet.memory_bandwidth,
        node_link=time["node_link"] * sheet.node_bandwidth,
        network=time["network"] * time["network_efficiency"],
        collective_latency=((8, time["collective_latency"]),),
        host_link=time["host_link"],
        decode_overhead=time["decode_overhead"],
        overlap=time["overlap"],
    )


def processor(cores: int, memory_bytes: float) -> Machine:
    """Processes on a machine's cores, under the assumptions of ``constants.yaml``; memory is the machine's total."""
    own = constants()["processor"]
    return Machine(
        name="cpu",
        memory_bytes=memory_bytes,
        matmul=((1, own["matmul"] / 50), (64, own["matmul"] / 2), (512, own["matmul"])),
        attention=own["attention"],
        memory_bandwidth=own["memory_bandwidth"],
        node_link=own["link"],
        network=own["link"],
        collective_latency=((2, own["collective_latency"]), (8, 4 * own["collective_latency"])),
        host_link=own["memory_bandwidth"],
        decode_overhead=own["decode_overhead"],
        overlap=0.0,
        cores=cores,
        source="assumptions about processors",
    )


def read_profile(path: Path) -> Machine:
    """Reads a profile written by ``tlt plan --profile``.

    Raises:
        ConfigError: it is unreadable or not a profile; one line per key.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as a profile: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: is not a JSON object; allowed: a profile written by `tlt plan --profile`")
    known = {field.name for field in fields(Machine)}
    optional = {"cores", "source"}
    problems = [f"{path}: {key}: unknown key; allowed: {', '.join(sorted(known))}" for key in values.keys() - known]
    problems += [f"{path}: {key}: missing" for key in sorted(known - optional - values.keys())]
    problems += [
        f"{path}: {key}: found {values[key]!r}; allowed: a number above 0"
        for key in sorted(known - optional - {"name", *_POINTS, "overlap", "decode_overhead"})
        if key in values and not _positive(values[key])
    ]
    problems += [
        f"{path}: {key}: found {values[key]!r}; allowed: [{what}] pairs, ascending"
        for key, what in _POINTS.items()
        if key in values and not _points(values[key])
    ]
    if problems:
        raise ConfigError("\n".join(sorted(problems)))
    return Machine(**values | {key: tuple((int(n), float(value)) for n, value in values[key]) for key in _POINTS})


def profile_text(machine: Machine) -> str:
    """A profile's file contents; ``read_profile`` returns an equal machine."""
    return json.dumps(asdict(machine), indent=1) + "\n"


def find_machine(given: str) -> Machine:
    """Looks up a device's name, ``cpu`` for this machine's processor, or a profile's path.

    Raises:
        ConfigError: it is neither, or ``read_profile`` fails.
    """
    if given in known_devices():
        return from_data_sheet(given)
    if given == CPU:
        found = describe_environment()
        return processor(int(found["cores"]), float(found["memory_gib"] or 0.0) * 2**30)
    path = Path(given)
    if path.is_file():
        return read_profile(path)
    names = ", ".join([*sorted(known_devices()), CPU])
    raise ConfigError(f"--devices: found {given!r}; allowed: {names}, or a file written by `tlt plan --profile`")


def _between(points: Sequence[tuple[int, float]], at: float) -> float:
    """Log-linear interpolation; beyond the points, the first or last value."""
    if at <= points[0][0]:
        return points[0][1]
    for (low, left), (high, right) in itertools.pairwise(points):
        if at <= high:
            return left + math.log(at / low) / math.log(high / low) * (right - left)
    return points[-1][1]


def _positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _points(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    pairs = [p for p in value if isinstance(p, list) and len(p) == 2 and all(map(_positive, p))]
    sides = [p[0] for p in pairs]
    return len(pairs) == len(value) and sides == sorted(set(sides))

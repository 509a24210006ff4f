"""``tlt simulate CONFIG --failures``: the effective training time ratio of long runs, by mechanism of recovery."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_tlt.cli import runs
from megatron_tlt.cli.plan_tables import table_of
from megatron_tlt.cli.planned import layout_chooser, mean_response
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.errors import ConfigError
from megatron_tlt.planning.elastic import ElasticChoice
from megatron_tlt.planning.failures import EttrRow, FailureModel, compare, recoveries
from megatron_tlt.planning.machine import documented, find_machine

_SECTIONS = ("failures", "recovery")
_SIZES = (64, 1024, 9600)
_MOST_MISSING = 8
"""Missing nodes at which a job that shrinks still goes on; more at a time are too rare to matter."""
_PLOTS = (".svg", ".png", ".pdf")
_Found = dict[int, tuple[ElasticChoice, list[float], list[EttrRow]]]
"""By number of devices: the layout, the speed by the number of missing nodes, and the mechanisms."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that apply only with ``--failures``."""
    group = parser.add_argument_group("failures (--constant takes the names in planning/constants.yaml here)")
    sizes = " ".join(map(str, _SIZES))
    group.add_argument(
        "--devices-list", metavar="N", type=int, nargs="+", help=f"numbers of devices in whole nodes (default: {sizes})"
    )
    group.add_argument("--days", type=float, default=90.0, help="length of the run (default 90)")
    group.add_argument("--runs", type=int, default=20, help="repetitions with other failures (default 20)")


def run(arguments: argparse.Namespace, config: TltConfig) -> int:
    """Simulates and prints every size; raises ConfigError for a wrong option, or a size on which nothing fits."""
    values = _values(arguments.constant)
    sizes = _sizes(arguments, config.launcher.nproc_per_node)
    save_every, seeds = (
        config.trainer.save_every or 1,
        range(arguments.first_seed, arguments.first_seed + arguments.runs),
    )
    found: _Found = {}
    for devices in sizes:
        choice, speeds = _speeds(config, devices, arguments.device)
        model = FailureModel(devices, values["device_mtbf_hours"], values["node_lost"], values["replacement_s"])
        rows = compare(recoveries(choice.total, save_every, values), model, speeds, arguments.days, seeds)
        found[devices] = choice, speeds, rows
    runs.write_json(arguments.json, _figures(found, values, arguments.days, len(seeds)))
    _print(config, found, values, arguments)
    if arguments.plot is not None:
        from megatron_tlt.planning.failures_plot import plot

        heading = f"{config.run.name}: {arguments.device}, projected"
        plot({devices: rows for devices, (_, _, rows) in found.items()}, arguments.plot, heading)
        print(f"plot: {arguments.plot}")
    return 0


def _values(given: list[str]) -> dict[str, float]:
    values = {name: float(entry["value"]) for part in _SECTIONS for name, entry in documented()[part].items()}
    for item in given:
        name, _, text = item.partition("=")
        try:
            value = float(text)
        except ValueError:
            raise ConfigError(f"--constant: found {item!r}; allowed: NAME=VALUE with a number") from None
        if name not in values:
            raise ConfigError(f"--constant: found {name!r} with --failures; allowed: {', '.join(values)}")
        if name == "device_mtbf_hours":
            allowed, fits = "above 0", value > 0.0  # infinite: devices never fail
        elif name == "node_lost":
            allowed, fits = "0 to 1", 0.0 <= value <= 1.0
        else:
            allowed, fits = "at least 0", 0.0 <= value < float("inf")
        if not fits:
            raise ConfigError(f"--constant: {name} is {value:g}; allowed: {allowed}")
        values[name] = value
    return values


def _sizes(arguments: argparse.Namespace, per_node: int) -> list[int]:
    if arguments.plot is not None and arguments.plot.suffix not in _PLOTS:
        raise ConfigError(f"--plot: found {arguments.plot.name}; allowed: one of the extensions {', '.join(_PLOTS)}")
    if not 0.0 < arguments.days < float("inf"):
        raise ConfigError(f"--days: found {arguments.days:g}; allowed: above 0")
    if arguments.runs < 1:
        raise ConfigError(f"--runs: found {arguments.runs}; allowed: at least 1")
    sizes = sorted(set(arguments.devices_list or _SIZES))
    if wrong := [size for size in sizes if size < 1 or size % per_node]:
        found = ", ".join(map(str, wrong))
        raise ConfigError(f"--devices-list: found {found}; allowed: multiples of launcher.nproc_per_node, {per_node}")
    return sizes


def _speeds(config: TltConfig, devices: int, device: str) -> tuple[ElasticChoice, list[float]]:
    """The layout of a size, and its speed by the number of missing nodes, relative to all nodes.

    The batch grows with the size, so that each device has the config's share of a step; it does not shrink with what
    is lost.
    """
    launcher = config.launcher
    prompts = max(1, round(config.trainer.prompts_per_step * devices / launcher.world_size))
    chooser = layout_chooser(config, find_machine(device), mean_response(None, config), prompts=prompts)
    whole, speeds = chooser.best(devices), [1.0]
    for left in range(devices - launcher.nproc_per_node, 0, -launcher.nproc_per_node):
        if len(speeds) > _MOST_MISSING:
            break
        try:
            speeds.append(whole.total / chooser.best(left).total)
        except ConfigError:
            break  # too small: it stands still
    return whole, speeds


def _figures(found: _Found, values: dict[str, float], days: float, seeds: int) -> dict[str, Any]:
    constants = {name: entry for part in _SECTIONS for name, entry in documented()[part].items()}
    return {
        "days": days,
        "runs": seeds,
        "constants": {
            name: constants[name] if value == constants[name]["value"] else {"value": value, "source": "given"}
            for name, value in values.items()
        },
        "sizes": {
            str(devices): {
                "actor": str(choice.layout),
                "step_s": choice.total,
                "speed_by_missing_nodes": speeds,
                "mechanisms": [asdict(row) for row in rows],
            }
            for devices, (choice, speeds, rows) in found.items()
        },
    }


def _print(config: TltConfig, found: _Found, values: dict[str, float], arguments: argparse.Namespace) -> None:
    console = Console(highlight=False)
    console.print(
        f"effective training time ratio of {arguments.runs} simulated runs of {arguments.days:g} days on "
        f"{arguments.device}; a projection from computed steps and assumed recovery times, not a measurement"
    )
    if not config.trainer.save_every:
        console.print("note: trainer.save_every is 0; a checkpoint after every step is simulated instead")
    for devices, (choice, speeds, rows) in found.items():
        hours = values["device_mtbf_hours"] / devices
        less = f"without a node {speeds[1]:.3f} of the speed" if len(speeds) > 1 else "no layout without a node"
        often = f"a failure every {hours:,.1f} h"
        title = f"{devices:,} devices: {choice.layout}, a step of {choice.total:.0f} s, {less}; {often}"
        console.print(_table(rows, title))
    console.print("x0.5, x2: all times to restart and to replace a node; the rate of failures")
    for part in _SECTIONS:
        for name, entry in documented()[part].items():
            source = entry["source"] if values[name] == entry["value"] else "given"
            console.print(f"{name} {values[name]:g}: {source}")


def _table(rows: list[EttrRow], title: str) -> Table:
    columns = ("ETTR", "closed\nform", "times\nx0.5", "times\nx2", "rate\nx0.5", "rate\nx2")
    table = table_of(title, "mechanism", *columns)
    for row in rows:
        name = f"{row.recovery.name}, {'shrinks' if row.recovery.shrinks else 'waits'}"
        others = (row.recovery_half, row.recovery_double, row.rate_half, row.rate_double)
        exact = "-" if row.exact is None else f"{row.exact:.1%}"
        error = f"{row.now.mean:.1%} ±{100 * row.now.error:.1f}"
        table.add_row(name, error, exact, *(f"{one.mean:.1%}" for one in others))
    return table

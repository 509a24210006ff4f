"""``tlt plan CONFIG --elastic``: the sizes that a config can run on, and when a change between them pays."""

from __future__ import annotations

import argparse
import math
from typing import Any

from rich.console import Console

from megatron_tlt.cli import runs
from megatron_tlt.cli.plan_tables import table_of
from megatron_tlt.cli.planned import layout_chooser, machine_of, mean_response
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.config.strict import logical_shards
from megatron_tlt.errors import ConfigError
from megatron_tlt.planning.machine import documented
from megatron_tlt.planning.scale_table import PAYS, ScaleRow, SizeChange, scale_table, size_changes, summarize_scale

_WAYS = {"disk": "disk_s", "snapshots": "snapshots_s", "forks": "forks_s"}
"""Ways to reconfigure, with their entry in the section ``recovery`` of planning/constants.yaml."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that apply only with ``--elastic``."""
    mtbf = documented()["failures"]["device_mtbf_hours"]["value"]
    group = parser.add_argument_group("other numbers of nodes")
    group.add_argument(
        "--mtbf-hours-per-device",
        metavar="H",
        type=float,
        help=f"mean hours between failures of a device (default {mtbf:,}: Llama 3, 2407.21783, section 3.3.4)",
    )
    group.add_argument(
        "--reconfigure-s",
        metavar="S",
        type=float,
        help="seconds that a change of size takes (default: assumed ones, from disk, from snapshots and with forks)",
    )
    group.add_argument(
        "--strict",
        action="store_true",
        help="only sizes whose gradients can be summed in one tree (default: elastic.strict)",
    )
    group.add_argument(
        "--logical-shards",
        metavar="V",
        type=int,
        help="leaves of that tree (default: elastic.logical_shards, or the config's data parallelism)",
    )


def run(arguments: argparse.Namespace, config: TltConfig) -> int:
    """Prints the table; raises ConfigError if nothing fits the config's own devices, or for a wrong option."""
    for name in ("mtbf_hours_per_device", "reconfigure_s"):
        value = getattr(arguments, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ConfigError(f"--{name.replace('_', '-')}: found {value:g}; allowed: above 0")
    own = logical_shards(config)
    strict = arguments.strict or own is not None
    if arguments.logical_shards is not None and not strict:
        raise ConfigError("--logical-shards: found without --strict; allowed: with it")
    machine, launcher = machine_of(config, arguments.devices), config.launcher
    mean = mean_response(arguments.mean_response, config)
    shards = own if arguments.logical_shards is None else arguments.logical_shards
    chooser = layout_chooser(config, machine, mean, strict=strict, logical_shards=shards)
    nodes = launcher.nnodes
    rows = scale_table(chooser, [*range(1, nodes + 1), 2 * nodes], launcher.nproc_per_node, nodes)
    mtbf = arguments.mtbf_hours_per_device or float(documented()["failures"]["device_mtbf_hours"]["value"])
    ways = {way: float(documented()["recovery"][key]["value"]) for way, key in _WAYS.items()}
    if arguments.reconfigure_s is not None:
        ways = {"given": arguments.reconfigure_s}
    changes = size_changes(rows, nodes, mtbf, ways)
    figures = {"machine": machine.name, "machine_source": machine.source, "mtbf_hours_per_device": mtbf}
    runs.write_json(arguments.json, figures | {"nodes": nodes, "mean_response": mean} | summarize_scale(rows, changes))
    _print(figures, rows, changes, arguments)
    return 0


def _print(
    figures: dict[str, Any], rows: list[ScaleRow], changes: list[SizeChange], arguments: argparse.Namespace
) -> None:
    console = Console(highlight=False)
    console.print(f"{figures['machine']}: {figures['machine_source']}; the same global batch at every size")
    title = "sizes (computed; rollout without speculation)"
    table = table_of(title, "nodes", "actor", "used", "idle", "step (s)", "throughput", "margin (GB)")
    table.columns[1].justify = "left"
    for row, size in zip(rows, summarize_scale(rows, ())["sizes"], strict=True):
        actor = f"{size['actor']} ({size['stages']} layers)" if size["stages"] else size["actor"]
        step, margin = f"{row.choice.total:.1f}", f"{row.choice.margin / 1e9:.1f}"
        table.add_row(
            str(row.nodes), actor, str(row.choice.used), str(row.choice.idle), step, f"{row.throughput:.2f}", margin
        )
    console.print(table)
    if changes:
        console.print(_changes(changes))
    given = arguments.mtbf_hours_per_device is not None
    source = "given" if given else documented()["failures"]["device_mtbf_hours"]["source"]
    console.print(f"a device fails once in {figures['mtbf_hours_per_device']:,.0f} h ({source})")
    if arguments.reconfigure_s is None:
        console.print("seconds of a change are assumed until measured (planning/constants.yaml, recovery)")
    console.print(f"a change pays if the new size lasts until it has made up for the stall with {PAYS:.0%} or more")


def _changes(changes: list[SizeChange]) -> Any:
    ways = list(dict.fromkeys(change.way for change in changes))
    headings = (f"{way}, {next(c.reconfigure_s for c in changes if c.way == way):g} s" for way in ways)
    table = table_of("growing: minutes to pay back, probability to last that long", "nodes", "speed-up", *headings)
    for before, after in dict.fromkeys((change.before, change.after) for change in changes):
        own = [change for change in changes if (change.before, change.after) == (before, after)]
        cells = (
            f"{one.payback_s / 60:.1f}, {one.probability:.1%}{'' if one.pays else ' no'}"
            if math.isfinite(one.payback_s)
            else "never"
            for one in own
        )
        table.add_row(f"{before} to {after}", f"{own[0].speedup:.2f}", *cells)
    return table

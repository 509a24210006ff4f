"""The tables that ``tlt plan`` and ``tlt simulate`` print."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from megatron_tlt.planning.hetero.report import PlanReport
from megatron_tlt.reshard.projection import RANK_COLUMNS

# Up to this many ranks have one row each; with more, each node has one.
_MOST_ROWS = 16
_UNITS = ("B", "KB", "MB", "GB", "TB")


def print_reshard(summary: dict[str, Any]) -> None:
    """Prints the figures of ``reshard.projection.summarize``."""
    console = Console()
    sizes = "/".join(map(str, summary["itemsizes"]))
    console.print(
        f"actor {summary['actor']}, engines {summary['engines']}, on {summary['gpus']} GPUs of {summary['nodes']} "
        f"node(s); weights {_bytes(summary['model_bytes'])} at {sizes} bytes per element",
        highlight=False,
    )
    moved, bound = _bytes(summary["moved_bytes"]), _bytes(summary["lower_bound_bytes"])
    console.print(f"moved in all {moved}, lower bound {bound}, in {summary['transfers']} slices", highlight=False)
    for table in (_per_gpu(summary), _by_rank(summary), *_links(summary), _projection(summary)):
        console.print(table)


def print_step(summary: dict[str, Any]) -> None:
    """Prints the figures of ``planning.summary.summarize_step``."""
    console = Console()
    console.print(
        f"{size_of(summary['parameters'])} parameters, actor {summary['actor']}, {summary['engines']} on "
        f"{summary['processes']} devices ({summary['machine']}: {summary['machine_source']})",
        highlight=False,
    )
    for table in (_memory(summary), _fullest(summary), _times(summary)):
        console.print(table)
    if summary["optimizer_unknown"]:
        console.print(
            f"the optimizer is taken to keep two moments, as it could not be run here: {summary['optimizer_unknown']}",
            highlight=False,
        )
    if summary["snapshot_bytes"]:
        console.print(
            f"snapshots take {summary['snapshot_bytes'] / 1e9:.1f} GB of host memory on the fullest node "
            "(elastic.memory_dir)",
            highlight=False,
        )
    if summary["base_copy_bytes"]:
        console.print(
            f"the engines' copies of the base without adapters take {summary['base_copy_bytes'] / 1e9:.1f} GB of host "
            "memory on a node (actor.lora)",
            highlight=False,
        )
    memory = summary["memory"]
    verdict = "fits" if memory["fits"] else "does not fit"
    console.print(
        f"{verdict}: margin {memory['margin'] / 1e9:.1f} GB of {memory['capacity'] / 1e9:.1f} GB; an engine's KV cache "
        f"holds {memory['cache_tokens']:,} tokens, {memory['cache_tokens'] / memory['longest']:.1f} of the longest",
        highlight=False,
    )


def print_search(summary: dict[str, Any]) -> None:
    """Prints the figures of ``planning.summary.summarize_search``."""
    console = Console()
    console.print(
        f"{summary['layouts']} layouts of {summary['processes']} devices ({summary['machine']}: "
        f"{summary['machine_source']}), {summary['choices']} choices evaluated",
        highlight=False,
    )
    title = "the fastest that fit (seconds, computed; rollout without speculation)"
    actor = "actor, recompute,\ntokens per micro-batch"
    table = table_of(title, actor, "engines", "rollout", "log-probs", "update", "step", "margin")
    for row in summary["best"]:
        seconds = (f"{row['seconds'][name]:.1f}" for name in ("rollout", "log_probs", "update", "total"))
        table.add_row(row["actor"], row["engines"], *seconds, _bytes(row["margin"]))
        table.add_row(f"  {row['recompute']}, {row['max_tokens_per_micro_batch']}")
    console.print(table)


def print_plan(report: PlanReport, console: Console) -> None:
    """Prints the tasks, then each task's replicas with their shares, layers and devices."""
    title = "tasks (computed from data sheets and assumed efficiencies, not measured)"
    table = table_of(title, "task", "group", "layout", "devices", "seconds", "ends at", "memory left")
    for task in report.tasks:
        used = sum(len(stage.devices) for replica in task.replicas for stage in replica.stages)
        devices, spent = f"{used} of {used + len(task.unused)}", f"{sum(task.seconds.values()):.1f}"
        ends, left = f"{task.ends_at:.1f}", f"{task.margin:.0%}"
        table.add_row(task.name, str(task.group), task.layout, devices, spent, ends, left)
    console.print(table)
    for task in report.tasks:
        table = table_of(f"{task.name}: replicas", task.unit, "layers", "devices")
        table.columns[0].justify, table.columns[2].justify = "right", "left"
        for replica in task.replicas:
            layers = "+".join(str(stage.layers) for stage in replica.stages)
            devices = " | ".join(f"{stage.kind} {' '.join(stage.devices)}" for stage in replica.stages)
            table.add_row(str(replica.share), layers, devices)
        console.print(table)


def _memory(summary: dict[str, Any]) -> Table:
    phases = summary["memory"]["phases"]
    names = list(dict.fromkeys(row["phase"] for row in phases))
    stages = sorted({row["stage"] for row in phases})
    table = table_of("memory per device (computed)", "phase", *(f"stage {stage}" for stage in stages))
    sizes = {(row["phase"], row["stage"]): row["total"] for row in phases}
    for name in names:
        table.add_row(name, *(_bytes(sizes[name, stage]) for stage in stages))
    return table


def _fullest(summary: dict[str, Any]) -> Table:
    """Each phase's fullest stage, by use."""
    table = table_of("contents of the fullest stage", "phase", "stage", "for")
    table.columns[2].justify = "left"
    rows = summary["memory"]["phases"]
    for name in dict.fromkeys(row["phase"] for row in rows):
        row = max((r for r in rows if r["phase"] == name), key=lambda r: float(r["total"]))
        parts = sorted(row["parts"].items(), key=lambda part: -part[1])
        table.add_row(name, str(row["stage"]), ", ".join(f"{k} {_bytes(v)}" for k, v in parts if v >= 0.5e6))
    return table


def _times(summary: dict[str, Any]) -> Table:
    times = summary["seconds"]
    table = table_of("time of a step (computed; rollout without speculation)", "phase", "seconds", "share")
    for name, seconds in times.items():
        table.add_row(_words(name), f"{seconds:.2f}", f"{seconds / times['total']:.0%}")
    return table


def table_of(title: str, *columns: str) -> Table:
    """An empty table, its first column to the left and whole (a layout's name), the others to the right."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=not index, overflow="fold")
    return table


def size_of(parameters: float) -> str:
    """Parameters in billions, or in millions below 100 million."""
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e8 else f"{parameters / 1e6:.1f} M"


def _words(column: str) -> str:
    return column.replace("nvlink", "NVLink").replace("_", " ")


def _per_gpu(summary: dict[str, Any]) -> Table:
    table = table_of("bytes per GPU", "", "min", "mean", "max")
    for name, spread in summary["per_gpu"].items():
        table.add_row(_words(name), *(_bytes(spread[key]) for key in ("min", "mean", "max")))
    return table


def _by_rank(summary: dict[str, Any]) -> Table:
    ranks = summary["ranks"]
    columns = map(_words, RANK_COLUMNS)
    if len(ranks) <= _MOST_ROWS:
        table = table_of("ranks", "rank", "node", *columns)
        for row in ranks:
            table.add_row(str(row["rank"]), str(row["node"]), *(_bytes(row[name]) for name in RANK_COLUMNS))
        return table
    table = table_of("the largest of each node's ranks (all ranks: --json FILE)", "node", "ranks", *columns)
    for node in sorted({row["node"] for row in ranks}):
        own = [row for row in ranks if row["node"] == node]
        largest = (_bytes(max(row[name] for row in own)) for name in RANK_COLUMNS)
        table.add_row(str(node), f"{own[0]['rank']}-{own[-1]['rank']}", *largest)
    return table


def _links(summary: dict[str, Any]) -> Iterator[Table]:
    links = summary["node_links"]
    if len(links) > 1:
        table = table_of("GB from node (row) to node (column)", "", *map(str, range(len(links))))
        for source, row in enumerate(links):
            table.add_row(str(source), *(f"{amount / 1e9:.2f}" if amount else "-" for amount in row))
        yield table


def _projection(summary: dict[str, Any]) -> Table:
    projection = summary["projection"]
    rates, notes = projection["bandwidths_gb_s"], projection["notes"]
    reached = {
        name: f"{rates[name]:g} GB/s x {rates[f'{name}_efficiency']:g}" for name in ("nvlink", "network", "memory")
    }
    rows = {
        "transfer": (f"NVLink {reached['nvlink']}, network {reached['network']}", notes["transfer"]),
        "load": (f"memory {reached['memory']}", notes["load"]),
        "wake": (f"{rates['wake']:g} GB/s", notes["wake"]),
        "total": ("", "one after the other"),
    }
    table = table_of("projection (computed from the figures above, not measured)", "", "seconds")
    table.add_column("at")
    table.add_column("of")
    for name, words in rows.items():
        table.add_row(name, f"{projection[f'{name}_seconds']:.3f}", *words)
    return table


def _bytes(amount: float) -> str:
    for unit in _UNITS:
        if amount < 1000 or unit == _UNITS[-1]:
            break
        amount /= 1000
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.2f} {unit}"

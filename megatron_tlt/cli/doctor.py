"""``tlt doctor [CONFIG]``: checks whether this machine, or every node of a job, can run it, and suggests fixes."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_tlt.cli.launch import under_torchrun
from megatron_tlt.cli.preflight import load_and_examine
from megatron_tlt.cli.runs import write_json
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.errors import ConfigError, TltError
from megatron_tlt.platform.doctor import Check, Needs, check_machine, guarded
from megatron_tlt.platform.nodes import Nodes, node_name, own_address

# Bytes of a checkpoint per parameter: two for the weights, four for each of Adam's two states and the main weights.
_BYTES_PER_PARAMETER = 14
_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("doctor", help="check this machine, or every node of a job, and suggest fixes")
    parser.add_argument(
        "config", metavar="CONFIG", type=Path, nargs="?", help="also check a launch config's requirements"
    )
    parser.add_argument("overrides", metavar="key.path=value", nargs="*", help="overrides of the config's values")
    parser.add_argument(
        "--node", action="store_true", help="one line if all checks pass, else one per failed check (for srun)"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all checks to FILE")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if int(os.environ.get("LOCAL_RANK", "0")):
        return 0  # under torchrun one process per node runs the checks
    checks = examine(arguments.config, arguments.overrides, stop_early=arguments.node)
    write_json(arguments.json, {"node": node_name(), "checks": list(map(asdict, checks))})
    if arguments.node:
        _print_lines(checks)
    else:
        _print_table(checks)
    return int(any(check.status == "fail" for check in checks))


def examine(path: Path | None, overrides: list[str], *, stop_early: bool = False) -> list[Check]:
    """Runs all checks, in the order of the table; without a valid config only general requirements are checked.

    ``stop_early`` skips checks that need other nodes if a check failed on this one, so that the others need not wait.
    """
    checks: list[Check] = []
    config = None
    if path is not None:
        try:
            config, notes = load_and_examine(path, overrides)
        except TltError as error:
            advice = "correct it; the model's folder must be visible on every node"
            checks += [Check("config", "fail", line, advice) for line in str(error).splitlines()]
        else:
            checks.append(Check("config", "ok", f"{path}, run.dir {config.run.dir}"))
            checks += [Check("config", "warn", note) for note in notes]
    needs = _needs(config)
    from megatron_tlt.platform import doctor_devices, doctor_links, doctor_nodes

    checks += guarded("devices", lambda: doctor_devices.check_devices(needs))
    gpus = doctor_devices.visible_count()
    checks += guarded("links", doctor_links.check_links)
    if gpus > 1:  # on a CPU all processes share the memory
        checks += guarded("pairs of devices", lambda: doctor_links.check_pairs(min(gpus, needs.processes)))
    checks += guarded("machine", lambda: check_machine(needs, gpus))
    checks += guarded("network", doctor_nodes.check_network)
    alone = config is None or config.launcher.nnodes == 1
    checks += guarded("run's folder", lambda: doctor_nodes.check_folder(needs.folder, leave=not alone))
    if config is None or alone:
        return checks
    try:
        nodes = _nodes(config.launcher.nnodes)
    except TltError as error:
        advice = "`srun tlt doctor` or torchrun on every node; slurm/train.sbatch does that"
        return [*checks, Check("nodes", "fail", str(error), advice)]
    checks += guarded("ports", lambda: doctor_nodes.check_ports(nodes))
    if stop_early and any(check.status == "fail" for check in checks):
        return checks
    return checks + guarded("nodes", lambda: doctor_nodes.check_between(nodes, needs.folder))


def _nodes(count: int) -> Nodes:
    """The nodes from a launcher's environment on each node, or from torchrun's variables."""
    if not under_torchrun():
        return Nodes.from_environment(count)
    given, found = os.environ, int(os.environ["GROUP_WORLD_SIZE"])
    if found != count:
        raise ConfigError(f"launcher.nnodes: found {count}; allowed: the {found} nodes of this torchrun")
    host = given["MASTER_ADDR"]
    # torchrun's own store uses its port; its host is the first node, where the next port is used
    port = int(given["MASTER_PORT"]) + 1
    job = given.get("TORCHELASTIC_RUN_ID", "torchrun")
    return Nodes(count, int(given["GROUP_RANK"]), host, port, job, *own_address(host, given.get("TLT_INTERFACE")))


def _needs(config: TltConfig | None) -> Needs:
    if config is None:
        import torch

        return Needs(max(1, torch.cuda.device_count()), 1, Path("runs"))
    from megatron_tlt.models.architecture import sizes_of
    from megatron_tlt.models.weight_map import WeightMap

    return Needs(
        config.launcher.nproc_per_node,
        config.launcher.threads_per_process,
        config.run.dir,
        needs_gpu=config.actor.transformer_impl == "transformer_engine",
        checkpoint_bytes=WeightMap(*sizes_of(config)).num_parameters * _BYTES_PER_PARAMETER,
        checkpoints=config.trainer.keep_checkpoints,
    )


def _print_lines(checks: list[Check]) -> None:
    """Prints a job's output, in which lines of many nodes are mixed: each line names its node."""
    for check in checks:
        if check.status != "ok":
            print(
                f"{node_name()}: {check.status.upper()}: {check.name}: {check.found} -> {check.advice}", file=sys.stderr
            )
    failed = sum(check.status == "fail" for check in checks)
    if not failed:
        print(f"{node_name()}: all of {len(checks)} checks passed", flush=True)


def _print_table(checks: list[Check]) -> None:
    table = Table(title=f"{node_name()}", title_justify="left")
    for column in ("check", "", "found", "what to do"):
        table.add_column(column, overflow="fold")
    for check in checks:
        table.add_row(check.name, f"[{_STYLES[check.status]}]{check.status}[/]", check.found, check.advice)
    Console().print(table, markup=True)

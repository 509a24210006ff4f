"""Host memory and seconds of a training step that are not computation, before tensors carried the samples and after."""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_tlt.bench.result import BenchmarkResult
from megatron_tlt.errors import ConfigError
from megatron_tlt.observe.environment import describe_environment
from megatron_tlt.platform.processes import run_processes

AFTER, BEFORE = "after", "before"
WORKER = Path(__file__).parent / "workers" / "data_plane.py"
_VALUES = ("mib_per_rank", "mib_of_all", "seconds", "cpu_seconds")
BASE = "1a2a300"
"""The last release whose samples were Python objects on every rank."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--baseline", type=Path, help=f"a checkout of {BASE} (git worktree add FOLDER {BASE})")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--responses", type=int, default=2048, help="of the step that figures are given for")
    parser.add_argument("--tokens", type=int, default=32768, help="of each response")
    parser.add_argument("--measured-before", type=int, nargs="+", default=[256, 512], help="two sizes or more")
    parser.add_argument("--measured-after", type=int, nargs="+", default=[2048], help="sizes; one or more")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for one case")


def extrapolate(sizes: Sequence[float], values: Sequence[float], size: float) -> float:
    """The value at ``size`` on the straight line through the first and the last measurement; one alone: through 0."""
    if sizes[-1] == size:
        return values[-1]
    if len(sizes) == 1:
        return values[0] * size / sizes[0]
    slope = (values[-1] - values[0]) / (sizes[-1] - sizes[0])
    return values[-1] + slope * (size - sizes[-1])


def _measure(release: str, processes: int, responses: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """One case; the same script runs in this tree and in the older one."""
    tree = arguments.baseline if release == BEFORE else Path(__file__).parents[2]
    what = f"{release}, {processes} processes, {responses} responses"
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(WORKER, Path(folder) / "data_plane_worker.py")
        out = Path(folder) / "out.json"
        given = json.dumps({"responses": responses, "tokens": arguments.tokens})
        # the safe path leaves out the current folder, which may be another tree
        environment = {"PYTHONPATH": f"{tree}:{folder}", "PYTHONSAFEPATH": "1"}
        run_processes(what, "data_plane_worker", [given, folder, str(out)], processes, arguments.timeout, environment)
        found = json.loads(out.read_text(encoding="utf-8"))
    if found["tree"] != str(tree.resolve()) or found["sharded"] != (release == AFTER):
        raise ConfigError(f"--baseline {tree}: found the code of {found['tree']}; allowed: a checkout of {BASE}")
    return {
        "release": release,
        "processes": processes,
        "responses": responses,
        "mib_per_rank": max(row["bytes"] for row in found["ranks"]) / 2**20,
        "mib_of_all": sum(row["bytes"] for row in found["ranks"]) / 2**20,
        "seconds": max(row["seconds"] for row in found["ranks"]),
        "cpu_seconds": max(row["cpu_seconds"] for row in found["ranks"]),
        "measured": str(responses),
    }


def run(arguments: argparse.Namespace) -> BenchmarkResult:
    """Memory is anonymous memory above what the process has before the step; the rank that rises most counts.

    Both releases form micro-batches one at a time, as their tensors are a GPU's, and the engine's own time is left out.
    Beside other work, ``cpu_seconds`` says more than ``seconds``, the clock's; the 2 ms sampler of memory is in both.
    Rows of ``responses`` other than measured ones are on the line through the measurements, named under ``measured``.

    Raises:
        ConfigError: ``--baseline`` is not a checkout of the release to compare with.
    """
    result = BenchmarkResult(environment=describe_environment(), name="data-plane")
    releases = {AFTER: arguments.measured_after}
    if arguments.baseline is not None:
        releases[BEFORE] = arguments.measured_before
    for processes in arguments.processes:
        at_size: dict[str, dict[str, Any]] = {}
        for release, sizes in releases.items():
            rows = [_measure(release, processes, size, arguments) for size in sizes]
            result.rows += rows
            at_size[release] = rows[-1]
            if sizes[-1] != arguments.responses:
                values = {
                    name: extrapolate(sizes, [row[name] for row in rows], arguments.responses) for name in _VALUES
                }
                measured = f"extrapolated from {', '.join(map(str, sizes))}"
                at_size[release] = {**rows[-1], "responses": arguments.responses, **values, "measured": measured}
                result.rows.append(at_size[release])
        if BEFORE in at_size:
            for name, what in (("mib_per_rank", "memory"), ("seconds", "seconds")):
                ratio = at_size[BEFORE][name] / at_size[AFTER][name]
                result.target(f"{what}_before_over_after_{processes}", ratio, ">=", 5.0)
    return result

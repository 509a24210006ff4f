"""The command line: one call measures what a part's file lacks, within ``--minutes``."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path
from types import ModuleType

from megatron_tlt.bench.result import BenchmarkResult
from tools.bench.gpu_measure.environment import describe, repository_root
from tools.bench.gpu_measure.measurement import Settings
from tools.bench.gpu_measure.record import Record, measure_missing, write_result

PARTS = ("smoke", "steps", "rollout", "colocate", "learn")


def parser() -> argparse.ArgumentParser:
    own = argparse.ArgumentParser(prog="python -m tools.bench.gpu_measure", description=__doc__)
    own.add_argument("part", choices=PARTS)
    own.add_argument("--out", type=Path, required=True, help="folder of PART.jsonl, PART.json and the logs")
    own.add_argument("--minutes", type=float, default=10.0, help="end after so many; run again for the rest")
    own.add_argument("--repeats", type=int, default=3, help="repeats of each measurement; a call adds one at most")
    own.add_argument("--only", nargs="+", metavar="NAME", help="measurements to run (default: all of the part)")
    own.add_argument("--small", action="store_true", help="rehearsal shapes; always without a GPU")
    own.add_argument("--lean", action="store_true", help="fewer points, an eighth of the response lengths")
    own.add_argument("--commit", help="the code's commit, in a copy without git")
    own.add_argument("--list", action="store_true", help="print the names of the part's measurements and exit")
    return own


def part_module(part: str) -> ModuleType:
    """The module with a part's ``measurements`` and ``judge``."""
    return importlib.import_module(f"tools.bench.gpu_measure.{part}")


def main(argv: list[str] | None = None) -> int:
    began = time.monotonic()
    arguments = parser().parse_args(argv)
    environment = describe(commit=arguments.commit)
    small = arguments.small or environment["device"] != "cuda"
    name = device_name(environment)
    settings = Settings(small=small, device=environment["device"], device_name=name, lean=arguments.lean)
    part = part_module(arguments.part)
    measurements = part.measurements(settings)
    if arguments.list:
        print("\n".join(measurement.name for measurement in measurements))
        return 0
    if unknown := set(arguments.only or ()) - {measurement.name for measurement in measurements}:
        names = ", ".join(measurement.name for measurement in measurements)
        print(f"--only {' '.join(sorted(unknown))}: allowed: {names}", file=sys.stderr)
        return 2
    if not (small or environment["commit"]):
        print("--commit: found none, and no git here; allowed: what `git describe --always` prints", file=sys.stderr)
        return 2
    chosen = [one for one in measurements if not arguments.only or one.name in arguments.only]
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    try:
        record = Record(out / f"{arguments.part}.jsonl", settings, None if small else environment["commit"])
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    failed = measure_missing(
        record, chosen, environment, out, arguments.repeats, began + 60 * arguments.minutes, cwd=repository_root()
    )
    result = write_result(record, arguments.part, part.judge, measurements, environment, out)
    BenchmarkResult(environment, result.name, targets=result.targets).print()  # the rows are in the files
    for name in failed:
        print(f"failed: {name} (see {out / arguments.part}.jsonl)", file=sys.stderr)
    return 1 if failed else 0


def device_name(environment: dict[str, object]) -> str:
    """The GPU's name, "cpu" without one: figures of different devices are not combined."""
    names = environment.get("gpu_names")
    return str(names[0]) if isinstance(names, list) and names else "cpu"


if __name__ == "__main__":
    sys.exit(main())

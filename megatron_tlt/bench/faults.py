"""A campaign of seeded faults over parts of a run and over whole runs; resumable."""

from __future__ import annotations

import argparse
import random
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_tlt.bench.fault_parts.components import BROKEN, HUNG, NOT_POSSIBLE, PASSED, in_turn, parts, trials
from megatron_tlt.bench.fault_parts.trial import Broken
from megatron_tlt.bench.fault_parts.whole_runs import FAULTS, MOST_LOST, FaultyRun, RunFault, undisturbed
from megatron_tlt.bench.result import BenchmarkResult
from megatron_tlt.errors import ConfigError
from megatron_tlt.observe.environment import describe_environment
from megatron_tlt.observe.jsonl import JsonLinesFile, read_jsonl

_WHOLE_RUN = "whole run"
_MOST_REASONS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--components", type=int, default=1000, help="faults of parts of a run (%(default)s)")
    parser.add_argument("--runs", type=int, default=12, help="whole runs (%(default)s)")
    parser.add_argument("--faults-per-run", type=int, default=4, help="faults of each of them (%(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="steps of each of them (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the campaign (%(default)s)")
    parser.add_argument("--config", type=Path, default=Path("launch/quickstart-deterministic.yaml"))
    parser.add_argument("--set", nargs="*", default=["trainer.prompts_per_step=12"], metavar="KEY=VALUE")
    parser.add_argument("--folder", type=Path, default=Path("runs/faults"), help="folder of the runs and results")
    parser.add_argument("--minutes", type=float, default=60.0, help="start no fault later; run again for the rest")


def run(arguments: argparse.Namespace) -> BenchmarkResult:
    """A row per part and fault; targets: no run lost, no hang, no torn file, at most one step lost to each fault.

    Raises:
        ConfigError: the folder has results of other arguments.
        RunError: the undisturbed run failed.
    """
    steps, most = arguments.steps, arguments.faults_per_run
    if most >= steps:
        raise ConfigError(f"--faults-per-run: found {most} in {steps} steps; allowed: less than --steps")
    until = time.monotonic() + 60 * arguments.minutes
    arguments.folder.mkdir(parents=True, exist_ok=True)
    file = JsonLinesFile(arguments.folder / "outcomes.jsonl")
    rows = read_jsonl(file.path)
    made_from = {
        "seed": arguments.seed,
        "config": str(arguments.config),
        "set": arguments.set,
        "steps": steps,
        "faults": most,
    }
    if not rows:
        file.append([made_from])
        rows = [made_from]
    if rows[0] != made_from:
        raise ConfigError(
            f"{file.path}: made with {rows[0]}, found {made_from}; allowed: the same, or another --folder"
        )
    rows += _component_faults(arguments, rows, file, until)
    rows += _run_faults(arguments, rows, file, until)
    file.close()
    return judge(rows[1:], arguments.components, arguments.runs, most)


def _component_faults(
    arguments: argparse.Namespace, rows: Sequence[Mapping[str, Any]], file: JsonLinesFile, until: float
) -> list[dict[str, Any]]:
    known = {(row["part"], row["fault"], row["seed"]) for row in rows[1:]}
    found: list[dict[str, Any]] = []
    numbered = zip(range(arguments.components), in_turn(parts()), strict=False)
    missing = [(number, *pair) for number, pair in numbered if (*pair, f"{arguments.seed}-{number}") not in known]
    if not missing:
        return found
    with trials(arguments.folder / "trials", arguments.folder / "trials.log") as process:
        for number, part, fault in missing:
            if time.monotonic() > until:
                break
            seed = f"{arguments.seed}-{number}"
            row = process.run(part, fault, seed).as_row()
            file.append([row])
            found.append(row)
            if row["result"] in (BROKEN, HUNG):
                print(f"{part}, {fault}, seed {seed}: {row['result']}: {row['reason']}", flush=True)
            elif (number + 1) % 50 == 0:
                print(f"{number + 1} of {arguments.components} faults of parts", flush=True)
    return found


def _run_faults(
    arguments: argparse.Namespace, rows: Sequence[Mapping[str, Any]], file: JsonLinesFile, until: float
) -> list[dict[str, Any]]:
    ended = {row["seed"] for row in rows[1:] if row["part"] == _WHOLE_RUN}
    reference = arguments.folder / "undisturbed"
    found: list[dict[str, Any]] = []
    for number in range(arguments.runs):
        seed = f"{arguments.seed}-run-{number}"
        if seed in ended:
            continue
        if time.monotonic() > until:
            break
        undisturbed(arguments.config, arguments.set, reference, arguments.steps)
        new = _one_run(arguments, seed, number, reference)
        file.append(new)
        found += new
        print(
            f"run {number + 1} of {arguments.runs}: " + "; ".join(f"{r['fault']} {r['result']}" for r in new),
            flush=True,
        )
    return found


def _one_run(arguments: argparse.Namespace, seed: str, number: int, reference: Path) -> list[dict[str, Any]]:
    """Its faults, in another order in each run, after steps drawn at random."""
    rng = random.Random(seed)
    names, most = list(FAULTS), arguments.faults_per_run
    chosen = [names[(number * most + k) % len(names)] for k in range(most)]
    rng.shuffle(chosen)
    after = sorted(rng.sample(range(1, arguments.steps), most))
    folder = arguments.folder / f"run-{number}"
    shutil.rmtree(folder, ignore_errors=True)
    run = FaultyRun(arguments.config, arguments.set, folder, arguments.steps)
    done: list[RunFault] = []
    broken = ""
    run.start()
    try:
        for fault, step in zip(chosen, after, strict=True):
            done.append(run.do(fault, rng, step))
        run.finish()
        run.compare(reference)
        shutil.rmtree(folder)
    except Broken as error:
        broken = str(error)
    finally:
        run.close()
    rows = [{"part": _WHOLE_RUN, "seed": seed, "result": PASSED, "reason": "", **asdict(each)} for each in done]
    if broken:  # whichever fault it was, the one in work or the last one is named
        rows = [*rows[: most - 1], {"part": _WHOLE_RUN, "seed": seed, "fault": chosen[min(len(rows), most - 1)]}]
        rows[-1] |= {"result": BROKEN, "reason": broken, "seconds": 0.0, "lost_steps": 0}
    return rows


def judge(rows: Sequence[Mapping[str, Any]], components: int, runs: int, faults_per_run: int) -> BenchmarkResult:
    """The table of the campaign, and its targets when all of it has run."""
    result = BenchmarkResult(environment=describe_environment(), name="faults")
    for part, fault in dict.fromkeys((row["part"], row["fault"]) for row in rows):
        own = [row for row in rows if (row["part"], row["fault"]) == (part, fault)]
        reasons = dict.fromkeys(row["reason"] for row in own if row["reason"])
        done = [row for row in own if row["result"] != NOT_POSSIBLE]
        result.rows.append(
            {
                "part": part,
                "fault": fault,
                "faults": len(done),
                "broken": sum(row["result"] == BROKEN for row in own),
                "hung": sum(row["result"] == HUNG for row in own),
                "longest (s)": max((row["seconds"] for row in done), default=None),
                "most steps lost": max((row.get("lost_steps", 0) for row in own), default=0),
                "reasons": "; ".join(list(reasons)[:_MOST_REASONS]) or None,
            }
        )
    done = [row for row in rows if row["result"] != NOT_POSSIBLE]
    whole = [row for row in rows if row["part"] == _WHOLE_RUN]
    complete = len(rows) - len(whole) >= components and len({row["seed"] for row in whole}) >= runs
    beyond = sum(row["lost_steps"] > MOST_LOST[row["fault"]] for row in whole)
    targets = {
        "faults": (len(done), ">=", components + runs * faults_per_run),
        "promises that a part did not keep": (sum(r["result"] == BROKEN for r in done if r not in whole), "==", 0),
        "runs that were lost or ended with other bits": (sum(r["result"] == BROKEN for r in whole), "==", 0),
        "hangs": (sum(row["result"] == HUNG for row in done), "==", 0),
        "faults that cost more than one step": (beyond, "==", 0),
    }
    for name, (value, op, wanted) in targets.items():
        if complete:
            result.target(name, value, op, wanted)
        else:
            result.incomplete(name)
    return result

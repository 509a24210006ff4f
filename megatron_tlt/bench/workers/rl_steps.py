"""RL steps of several runs in the same processes, interleaved step by step; every rank has its own core."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_tlt.platform.collectives import all_gather_data
from megatron_tlt.platform.device import barrier, initialize_distributed, prepare, rank, world_size
from megatron_tlt.platform.files import atomic_write_text
from megatron_tlt.platform.processes import die_with_parent
from megatron_tlt.trainer.loop import Run
from megatron_tlt.trainer.step import StepResult


def pin_to_core(count: int) -> None:
    """Pins each of a machine's ``count`` ranks to its own core, as each has its own GPU in production.

    Does nothing if there are too few cores.
    """
    allowed = sorted(os.sched_getaffinity(0))
    if count > len(allowed):
        return
    core = allowed[int(os.environ["LOCAL_RANK"])]
    for thread in os.listdir("/proc/self/task"):  # libraries have already started threads
        os.sched_setaffinity(int(thread), {core})


def ranks_are_pinned() -> bool:
    """Whether each rank has its own core; collective. Checked now, as an engine may have moved its rank."""
    cores = all_gather_data(sorted(os.sched_getaffinity(0)), list[int])
    return len({tuple(own) for own in cores if len(own) == 1}) == world_size()


def measure_pinned(given_json: str, out: str, measure: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Main function of such a worker: rank 0 writes the result of ``measure``, and whether ranks were pinned."""
    die_with_parent(signal.SIGKILL)
    given = json.loads(given_json)
    pin_to_core(int(os.environ["LOCAL_WORLD_SIZE"]))
    prepare()
    initialize_distributed(600)
    found = measure(given)
    pinned = ranks_are_pinned()
    if rank() == 0:
        atomic_write_text(Path(out), json.dumps({**found, "pinned": pinned}))
    barrier()


@contextmanager
def serving(runs: Mapping[str, Run]) -> Iterator[None]:
    """Gives all runs' engines their policy's weights, and runs their services."""
    with ExitStack() as stack:
        for run in runs.values():
            stack.enter_context(run.serving())
            run.step.reshard(0, StepResult(), ignore)
        yield


@dataclass
class Position:
    """Where a run is in its training problems; see ``TrainingStep.run``."""

    next_problem: int | None = None
    deferred: tuple[int, ...] = ()


def steps_in_turns(
    runs: Mapping[str, Run], number: int, positions: Mapping[str, Position] | None = None
) -> list[dict[str, Any]]:
    """One RL step of each run; the first run changes with ``number``. Times are the slowest rank's.

    ``positions`` are those of runs that do not draw the same number of problems in each step; they are moved.
    """
    arms = list(runs)
    turn = number % len(arms)
    rows = []
    for arm in arms[turn:] + arms[:turn]:
        barrier()
        at = positions[arm] if positions else Position()
        result = runs[arm].step.run(number, ignore, ignore, ignore, at.next_problem, at.deferred)
        metrics, at.next_problem, at.deferred = result.metrics, result.next_problem, result.deferred
        everyone = all_gather_data(metrics, dict[str, float])
        times = {name: max(row[name] for row in everyone) for name in metrics if name.startswith("time/")}
        rows.append({"arm": arm, "round": number, **metrics, **times})
        tell(f"step {number + 1}, {arm}: {times['time/total']:.2f} s")
    return rows


def tell(line: str) -> None:
    """Prints a line once, not once per rank."""
    if rank() == 0:
        print(line, flush=True)


def ignore(*_: object) -> None:
    """Discards the progress."""

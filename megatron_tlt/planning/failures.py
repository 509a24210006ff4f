"""Effective training time of a long run with failures: a seeded simulation, and its closed form where one exists; pure.

The effective training time ratio (ETTR) is the time that went into steps which count over the run's whole time, as in
ByteRobust (2509.16293); steps that are lost and done again count once. The model:

- Each device fails as a Poisson process of its own, so n devices fail n times as often as one.
- Training reaches a durable point after every ``interval_s`` seconds of steps and a stall to save it. A failure takes
  it back to the last durable point.
- A failure keeps the job down for the time to restart, and if it takes a node along, for the wait for another one. One
  that arrives while the job is down needs its own recovery from then on; all of them go on at the same time.
- With shrinking nobody waits: the job goes on with the nodes that are left, at their computed speed, and stands still
  once more, for as long as a restart, when the node is replaced. It loses no steps then.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, expm1, floor
from statistics import fmean, stdev

_DAY, _HOUR = 86400.0, 3600.0


@dataclass(frozen=True)
class Recovery:
    """A mechanism of recovery.

    Attributes:
        name: what it is called.
        interval_s: seconds of steps between two durable points.
        stall_s: seconds for which training stops to make one.
        restart_s: from a failure to the next step's start, without a wait for a node.
        shrinks: whether it goes on with the nodes that are left.
    """

    name: str
    interval_s: float
    stall_s: float
    restart_s: float
    shrinks: bool = False


def recoveries(step_s: float, save_every: int, times: Mapping[str, float]) -> list[Recovery]:
    """The mechanisms that are compared, each waiting for nodes and shrinking.

    Args:
        step_s: seconds of a step.
        save_every: steps from one checkpoint to the next, at least 1; snapshots are taken after every step.
        times: seconds by the names in the section ``recovery`` of planning/constants.yaml.
    """
    disk = Recovery("disk", save_every * step_s, times["save_stall_s"], times["disk_s"])
    snapshots = Recovery("snapshots", step_s, times["snapshot_stall_s"], times["snapshots_s"])
    forks = replace(snapshots, name="forks", restart_s=times["forks_s"])
    return [replace(one, shrinks=shrinks) for one in (disk, snapshots, forks) for shrinks in (False, True)]


@dataclass(frozen=True)
class FailureModel:
    """How ``devices`` devices fail.

    Attributes:
        devices: of the job.
        mtbf_hours: mean hours between failures of one device; infinite for none.
        node_lost: share of the failures after which a node must be replaced.
        replacement_s: seconds from such a failure until another node is ready.
    """

    devices: int
    mtbf_hours: float
    node_lost: float
    replacement_s: float

    @property
    def rate(self) -> float:
        """Failures of the job per second."""
        return self.devices / (self.mtbf_hours * _HOUR)


@dataclass(frozen=True)
class Ettr:
    """ETTR as the mean over seeds, and the standard error of that mean."""

    mean: float
    error: float


@dataclass(frozen=True)
class DeviceFailure:
    """One failure: seconds from the run's start; ``mark`` and ``node`` are uniform in [0, 1)."""

    at: float
    mark: float
    """It belongs to traces of at least this share of the rate that it was drawn with."""
    node: float
    """It takes a node along if this is below the model's share."""


def draw_failures(rate: float, days: float, seed: int) -> list[DeviceFailure]:
    """The failures of a run at ``rate`` per second, ascending."""
    chosen, at, found = random.Random(seed), 0.0, []
    while rate > 0.0:
        at += chosen.expovariate(rate)
        if at >= days * _DAY:
            break
        found.append(DeviceFailure(at, chosen.random(), chosen.random()))
    return found


def closed_form(recovery: Recovery, failures: FailureModel) -> float:
    """ETTR of an infinitely long run that waits for nodes, or 0 below what a float can hold.

    With failures at rate L, a durable interval of t seconds of steps and d of stall takes (exp(L (t + d)) - 1) / L
    seconds of running on average, and as many failures as exp(L (t + d)) - 1. Each of these starts a time in which the
    job is down: recoveries of D seconds on average, which overlap, are the busy period of a queue with infinitely many
    servers, (exp(L D) - 1) / L long (Takacs, Introduction to the Theory of Queues, 1962, chapter 3). Both give

        ETTR = L t exp(-L D) / (exp(L (t + d)) - 1),   D = restart + node_lost x replacement,

    which for a wait of 0 is the formula of Daly, "A higher order estimate of the optimum checkpoint interval for
    restart dumps" (2006). Without failures it is t / (t + d).

    Raises:
        ValueError: the mechanism shrinks; there is no closed form for that.
    """
    if recovery.shrinks:
        raise ValueError(f"{recovery.name}: shrinks; allowed: mechanisms that wait, as others have no closed form")
    rate, segment = failures.rate, recovery.interval_s + recovery.stall_s
    if rate == 0.0:
        return recovery.interval_s / segment
    down = recovery.restart_s + failures.node_lost * failures.replacement_s
    if rate * segment > 700.0:
        return 0.0
    return rate * recovery.interval_s * exp(-rate * down) / expm1(rate * segment)


def simulate_run(
    recovery: Recovery,
    failures: FailureModel,
    trace: Sequence[DeviceFailure],
    days: float,
    speeds: Sequence[float] = (1.0,),
) -> float:
    """ETTR of one run with the failures of ``trace``; in [0, 1].

    Shorter restarts never lower it, and further failures never raise it, for a fixed trace.

    Args:
        recovery: the mechanism.
        failures: its share of lost nodes and the time of a replacement; the trace has the rate.
        trace: ascending.
        days: length of the run.
        speeds: of a job that shrinks, by the number of nodes that are missing, relative to all nodes, not rising.
            With more nodes missing it stands still.
    """
    segment, end = recovery.interval_s + recovery.stall_s, days * _DAY
    events: list[tuple[float, int]] = []  # time, and the change of missing nodes: 0 or 1 for a failure, -1 a return
    for one in trace:
        lost = one.node < failures.node_lost
        events.append((one.at, int(lost)))
        if lost and recovery.shrinks:
            events.append((one.at + failures.replacement_s, -1))
    clock = ready = progress = 0.0
    missing = 0

    def until(time: float) -> float:
        """Progress at a time, in seconds of a job with all nodes."""
        speed = speeds[missing] if missing < len(speeds) else 0.0
        return progress + max(0.0, time - max(clock, ready)) * speed

    for at, change in sorted(events):
        if at >= end:
            break
        progress, clock = until(at), at
        wait = failures.replacement_s if change == 1 and not recovery.shrinks else 0.0
        ready = max(ready, at + recovery.restart_s + wait)
        if change >= 0:
            # what was reached since the last durable point is lost
            progress = floor(progress / segment) * segment
        if recovery.shrinks:
            missing += change
    return min(1.0, until(end) / segment * recovery.interval_s / end)  # rounding can exceed it


def simulate_ettr(
    recovery: Recovery,
    failures: FailureModel,
    traces: Sequence[Sequence[DeviceFailure]],
    days: float,
    speeds: Sequence[float] = (1.0,),
    share: float = 1.0,
) -> Ettr:
    """The mean over ``traces``, of each of which only the failures with a mark below ``share`` count.

    Comparisons on the same traces differ by the mechanism or the rate, not by luck.
    """
    found = [
        simulate_run(recovery, failures, [one for one in trace if one.mark < share], days, speeds) for trace in traces
    ]
    return Ettr(fmean(found), stdev(found) / len(found) ** 0.5 if len(found) > 1 else 0.0)


@dataclass(frozen=True)
class EttrRow:
    """A mechanism at a size: projected ETTR, with faster and slower recovery, and fewer and more failures.

    Attributes:
        recovery: the mechanism.
        devices: of the job.
        now: with the assumed times and rate.
        exact: ``closed_form``; None if it shrinks.
        recovery_half: restart and replacement in half the time; ``recovery_double`` in twice the time.
        rate_half: half as many failures; ``rate_double`` twice as many.
    """

    recovery: Recovery
    devices: int
    now: Ettr
    exact: float | None
    recovery_half: Ettr
    recovery_double: Ettr
    rate_half: Ettr
    rate_double: Ettr


def compare(
    recoveries: Sequence[Recovery], failures: FailureModel, speeds: Sequence[float], days: float, seeds: Sequence[int]
) -> list[EttrRow]:
    """Every mechanism under the same failures, one trace for each of ``seeds``; ``speeds`` as in ``simulate_run``."""
    traces = [draw_failures(2.0 * failures.rate, days, seed) for seed in seeds]

    def ettr(recovery: Recovery, time: float = 1.0, rate: float = 1.0) -> Ettr:
        own = replace(recovery, restart_s=time * recovery.restart_s)
        model = replace(failures, replacement_s=time * failures.replacement_s)
        return simulate_ettr(own, model, traces, days, speeds, rate / 2.0)

    return [
        EttrRow(
            one,
            failures.devices,
            ettr(one),
            None if one.shrinks else closed_form(one, failures),
            recovery_half=ettr(one, time=0.5),
            recovery_double=ettr(one, time=2.0),
            rate_half=ettr(one, rate=0.5),
            rate_double=ettr(one, rate=2.0),
        )
        for one in recoveries
    ]

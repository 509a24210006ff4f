"""Tuners against an oracle on replayed rollouts: regret, and recovery after a shift."""

from __future__ import annotations

import argparse
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from megatron_tlt.bench.result import BenchmarkResult
from megatron_tlt.bench.tuner_oracle import OracleTuner
from megatron_tlt.bench.tuner_traces import (
    BUDGETS,
    MAX_BATCH,
    SHIFTS,
    Played,
    RecordedTimes,
    Shift,
    SyntheticTimes,
    Times,
    Trace,
    Truth,
    play,
    recorded_files,
)
from megatron_tlt.errors import ConfigError
from megatron_tlt.observe.environment import describe_environment
from megatron_tlt.speculation.controller import SpeculationController
from megatron_tlt.speculation.gate import ElasticGate
from megatron_tlt.speculation.strategy import OFF, StepRecord, Strategy
from megatron_tlt.speculation.tuner import Tuner
from megatron_tlt.speculation.tuner_beg_mab import PUBLISHED
from megatron_tlt.speculation.tuner_solver import SolverTuner
from megatron_tlt.speculation.tuners import build_tuner

EARLY = 500
"""Steps from a cold start after which regret counts for the target."""
WINDOW = 100
"""Length in steps of the window whose regret shows whether a tuner has recovered."""
LIMIT = 0.05
DEFAULT, PUBLISHED_TUNER = "beg_mab", "beg_mab, published"
PROFILED = "solver, profiled before"
BATCHES = (MAX_BATCH, 256)
"""Responses of a rollout; a recording's traces have its maximum batch."""

Build = Callable[[Trace, Truth, int], Tuner]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=2400, help="engine steps per trace; the shift is at half")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each tuner on each trace")
    parser.add_argument(
        "--first-seed", type=int, default=100, help="first of consecutive seeds; 0 to 5 were used to choose defaults"
    )
    parser.add_argument("--times", nargs="+", help="use only these step times (synthetic or a recording's name)")
    parser.add_argument("--budgets", nargs="+", choices=BUDGETS, default=BUDGETS, help="draft budgets of the traces")
    steady = [1, 2, 4, 8, 16, 32, 64, 128, 256]
    parser.add_argument("--batches", type=int, nargs="+", default=steady, help="constant batches")


def _gate(batch: int) -> ElasticGate:
    return ElasticGate(batch, patience=3, hysteresis=4)


def _named(name: str, keep: Callable[[Strategy], bool] = lambda strategy: True, **options: Any) -> Build:
    """Builds a tuner over the strategies of the trace that ``keep`` accepts."""

    def build(trace: Trace, truth: Truth, seed: int) -> Tuner:
        strategies = [strategy for strategy in trace.strategies if keep(strategy)]
        return build_tuner(name, strategies, options, seed, max_batch=_gate(trace.batch).max_batch)

    return build


def _profiled(trace: Trace, truth: Truth, seed: int) -> Tuner:
    """A solver after its profiling pass: steps of full batches before the first rollout, equally noisy."""
    tuner = SolverTuner(trace.strategies, seed=seed, max_batch=_gate(trace.batch).max_batch)
    rng = np.random.default_rng(1000 + seed)
    noise = trace.times.noise(rng)
    drafters = trace.drafters(0)
    while wanted := tuner.wanted():
        strategy, batch = wanted[0]
        own, (_, shares) = rng.normal(size=batch), trace.draw(rng, batch)
        truth.look(drafters, own, shares)
        expected, drafts, accepted = truth.of(strategy), 0, np.zeros((batch, 0), dtype=int)
        if strategy != OFF:
            found, accepted = drafters[strategy.drafter].draw(rng, own, strategy.num_tokens, expected.budgets)
            drafts = int(expected.budgets[found].sum())
        counts = tuple(accepted.sum(axis=0).tolist())
        seconds = expected.seconds * next(noise)
        tuner.observe(StepRecord(strategy, batch, seconds, batch + sum(counts), drafts, counts, expected.mix))
    return tuner


TUNERS: dict[str, Build] = {
    "oracle": lambda trace, truth, seed: OracleTuner(trace.strategies, truth.rate),
    DEFAULT: _named("beg_mab"),
    "beg_mab, per request": _named("beg_mab", reward="per_request"),
    "beg_mab, published score": _named("beg_mab", reward="throughput", neighbours=0),
    PUBLISHED_TUNER: _named("beg_mab", lambda strategy: strategy.drafter == "eagle", **PUBLISHED),
    "solver": _named("solver"),
    PROFILED: _profiled,
    "static off": _named("static", OFF.__eq__),
}
"""All use the same strategies except the published code's default, whose buckets have one learned strategy each."""
FIRST_CASE_ONLY = ("beg_mab, per request", "beg_mab, published score")
"""These have no target and run only with the first batch size and the first kind of draft budgets."""


def run_tuner(trace: Trace, build: Build, seed: int, fixed_batch: int | None = None) -> Played:
    """Plays a trace with a tuner under the engines' controller, whose gate and hold also cause regret."""
    truth = Truth(trace)
    controller = SpeculationController(build(trace, truth, seed), _gate(trace.batch))
    return play(trace, controller, truth, seed, fixed_batch)


def recovery_steps(played: Played, shift_at: int, window: int = WINDOW, limit: float = LIMIT) -> int | None:
    """Steps from a shift until the regret of the last ``window`` steps is at most ``limit``; None if never."""
    ends = range(shift_at + window, len(played.seconds) + 1)
    return next((end - shift_at for end in ends if played.regret(end - window, end) <= limit), None)


def _spread(values: Iterable[float]) -> dict[str, float]:
    values = list(values)
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def _seeds(arguments: argparse.Namespace) -> range:
    return range(arguments.first_seed, arguments.first_seed + arguments.seeds)


def _best_static(trace: Trace, seed: int) -> Build:
    """The fixed strategy with the smallest loss on the first seed: the best a user could find by trying all."""
    regrets = {s: run_tuner(trace, _named("static", s.__eq__), seed).regret() for s in trace.strategies}
    return _named("static", min(regrets, key=regrets.__getitem__).__eq__)


def _row(trace: Trace, name: str, runs: Sequence[Played]) -> dict[str, Any]:
    steps, shift = trace.steps, trace.shift_at
    recovered = [recovery_steps(played, shift) for played in runs]
    chosen = Counter(name for played in runs for name in played.chosen)
    return {
        "trace": trace.name,
        "tuner": name,
        "regret_at_500": _spread(played.regret(0, EARLY) for played in runs),
        "regret": _spread(played.regret() for played in runs),
        "regret_after_shift": _spread(played.regret(shift) for played in runs),
        "regret_settled": _spread(played.regret((shift + steps) // 2) for played in runs),
        # an unrecovered run counts with all remaining steps
        "recovery_steps": _spread(steps - shift if n is None else n for n in recovered),
        "not_recovered": sum(n is None for n in recovered),
        "shares": {name: round(count / chosen.total(), 3) for name, count in chosen.most_common(4)},
    }


def _selected(names: Sequence[str] | None) -> list[Times]:
    every: list[Times] = [SyntheticTimes(), *map(RecordedTimes, recorded_files())]
    times = {one.name: one for one in every}
    for name in names or ():
        if name not in times:
            raise ConfigError(f"--times {name}: allowed are {', '.join(times)}")
    return [one for one in times.values() if names is None or one.name in names]


def run(arguments: argparse.Namespace) -> BenchmarkResult:
    """Regret is the share of the expected time that the best strategy at each step's batch would have saved.

    It counts from a cold start, against an oracle that knows the acceptance of the running requests and every step's
    expected time, and that needs no gate, hold or switch. With draft budgets it covers the requests that may have
    drafts. Targets use the median over seeds, on the worst trace of each batch size and kind of budgets. A second set
    of rows has a constant batch, for which one strategy is best.

    Raises:
        ConfigError: unknown step times.
    """
    result = BenchmarkResult(environment=describe_environment(), name="tuner")
    selected = _selected(arguments.times)
    for budgets in arguments.budgets:
        for batch in BATCHES:
            times = [one for one in selected if batch in _batches_of(one)]
            if times:
                _shifting(result, times, arguments, batch, budgets)
        _steady(result, selected, arguments, budgets)
    return result


def _batches_of(times: Times) -> Sequence[int]:
    return BATCHES if times.max_batch > BATCHES[-1] else [max(b for b in BATCHES if b <= times.max_batch)]


def _shifting(
    result: BenchmarkResult, times: Sequence[Times], arguments: argparse.Namespace, batch: int, budgets: str
) -> None:
    """Rows of rollouts of ``batch`` responses with these draft budgets, and the targets on the worst of them."""
    seeds, case = _seeds(arguments), f", batch {batch}, budgets {budgets}"
    is_first = (batch, budgets) == (BATCHES[0], BUDGETS[0])
    tuners = {name: build for name, build in TUNERS.items() if is_first or name not in FIRST_CASE_ONLY}
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for one in times:
        for shift in SHIFTS:
            trace = Trace(one, shift, arguments.steps, batch, budgets)
            for name, build in {**tuners, "static, best in hindsight": _best_static(trace, seeds[0])}.items():
                runs = [run_tuner(trace, build, seed) for seed in seeds]
                rows[trace.name, name] = _row(trace, name, runs)
    result.rows += rows.values()
    for name in (DEFAULT, PROFILED):
        own = [row for (_, tuner), row in rows.items() if tuner == name]
        short = name.split(",")[0]
        result.target(f"{short}_regret_at_500{case}", max(row["regret_at_500"]["median"] for row in own), "<=", LIMIT)
        result.target(f"{short}_recovery_steps{case}", max(row["recovery_steps"]["median"] for row in own), "<=", 300)
    ratios = [
        rows[trace, PUBLISHED_TUNER]["regret"]["median"] / row["regret"]["median"]
        for (trace, name), row in rows.items()
        if name == DEFAULT
    ]
    result.target(f"published_over_beg_mab_regret{case}", min(ratios), ">", 1.0)


def _steady(result: BenchmarkResult, times: Sequence[Times], arguments: argparse.Namespace, budgets: str) -> None:
    """Rows with a constant batch: a settled tuner's loss to the best static strategy."""
    worst: dict[int, float] = defaultdict(float)
    for one in times:
        for drafters in (SHIFTS[0].before, SHIFTS[0].after):
            for batch in (size for size in arguments.batches if size <= one.max_batch):
                gate = min((size for size in BATCHES if size >= batch), default=batch)
                trace = Trace(one, Shift("none", drafters, drafters), 2 * EARLY, gate, budgets)
                runs = [run_tuner(trace, TUNERS[DEFAULT], seed, batch) for seed in _seeds(arguments)]
                settled = _spread(played.regret(EARLY) for played in runs)
                chosen = Counter(name for played in runs for name in played.chosen[EARLY:])
                result.rows.append(
                    {
                        "trace": f"{one.name}, alpha {drafters['eagle'].alpha}, batch stays {batch}, budgets {budgets}",
                        "tuner": DEFAULT,
                        "regret_at_500": _spread(played.regret(0, EARLY) for played in runs),
                        "regret_settled": settled,
                        "shares": {name: round(n / chosen.total(), 3) for name, n in chosen.most_common(4)},
                    }
                )
                worst[gate] = max(worst[gate], settled["median"])
    for gate, loss in worst.items():
        name = f"beg_mab_loss_to_best_static_at_any_batch, up to {gate}, budgets {budgets}"
        result.target(name, loss, "<=", 0.03)

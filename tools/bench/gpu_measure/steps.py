"""Engine step times of the 7B shape: stock vLLM, and ours without speculation, with piecewise and with full graphs."""

from __future__ import annotations

import contextlib
import math
import statistics
from typing import TYPE_CHECKING, Any

from megatron_tlt.errors import RunError
from tools.bench.gpu_measure.measurement import Measurement, Settings

if TYPE_CHECKING:
    from megatron_tlt.bench.result import BenchmarkResult
    from tools.bench.gpu_measure.child import Job
    from tools.bench.gpu_measure.record import Rows

SHAPE = "7b"
STOCK, OFF_ARM, PIECEWISE, FULL = "stock", "V1 off", "V1 piecewise", "V1 full"
PREFILL_TOKENS = 8192
SETTLE = 4
"""Steps after a change that are not counted."""
PROFILED = 6
"""Steps that are profiled."""
PROFILE_ROWS = 14


def sizes(settings: Settings) -> dict[str, Any]:
    """Batches, numbers of drafts, prompt tokens and counted steps."""
    if settings.small:
        return {"batches": [1, 4], "drafts": [0, 1, 3], "prompt": 16, "steps": 6}
    if settings.lean:
        return {"batches": [1, 8, 32, 128], "drafts": [0, 1, 3, 7], "prompt": 256, "steps": 12}
    return {"batches": [1, 2, 4, 8, 16, 32, 64, 128, 256], "drafts": list(range(8)), "prompt": 512, "steps": 16}


def measurements(settings: Settings) -> list[Measurement]:
    """An engine each; on a CPU there is no V2 and there are no graphs, so piecewise and full are the same there."""
    own = sizes(settings)
    return [
        Measurement(STOCK, "steps:measure_stock", own, expected_s=150),
        Measurement(OFF_ARM, "steps:measure_ours", {**own, "drafts": [0], "arm": OFF_ARM}, expected_s=120),
        Measurement(PIECEWISE, "steps:measure_ours", {**own, "arm": PIECEWISE}, expected_s=180),
        Measurement(FULL, "steps:measure_ours", {**own, "arm": FULL}, expected_s=180),
    ]


def measure_stock(job: Job) -> None:
    """Median times between the engine's steps while all requests decode."""
    from tools.bench.gpu_measure import engines, models

    given = job.given
    vocab = models.write_config(job.work / "target", SHAPE, job.settings)["vocab_size"]
    batches, prompt = given["batches"], given["prompt"]
    most = max(batches)
    longest = math.ceil(most * prompt / PREFILL_TOKENS) + 3 * SETTLE + 4 * given["steps"]
    engine = engines.StockVllm(job.work / "target", job.settings, prompt + longest, most)
    for turn in range(2):  # the first one warms up
        for batch in batches:
            prefills = math.ceil(batch * prompt / PREFILL_TOKENS)
            length = prefills + 2 * SETTLE + 3 * given["steps"]
            times: list[float] = []
            engine.generate(engines.make_requests(batch, prompt, [length] * batch, vocab, 1.0), times.append)
            kept = times[prefills + SETTLE : length - SETTLE]
            if turn:
                row = {"batch": batch, "drafts": 0, "milliseconds": 1e3 * statistics.median(kept), "steps": len(kept)}
                job.emit(arm=STOCK, **row, **engine.description)


def measure_ours(job: Job) -> None:
    """Median step times of each number of drafts; one rollout per batch goes through all of them, ascending."""
    from megatron_tlt.rollout.vllm_engine import VllmEngine
    from megatron_tlt.speculation.strategy import OFF, Strategy
    from tools.bench.gpu_measure import engines, models

    given, arm = job.given, job.given["arm"]
    engines.start_process()
    target = job.work / "target"
    vocab = models.write_config(target, SHAPE, job.settings)["vocab_size"]
    most, batches, prompt = max(given["drafts"]), given["batches"], given["prompt"]
    head = models.write_head(job.work / "head", target, job.settings) if most else None
    each = SETTLE + given["steps"]
    longest = math.ceil(max(batches) * prompt / PREFILL_TOKENS) * (most + 1)
    longest += sum((each + 1) * (drafts + 1) for drafts in given["drafts"]) + most + 1
    section = engines.head_section(head, most)
    rollout = engines.rollout_config(
        job.settings, prompt, longest, max_num_seqs=max(batches), max_num_batched_tokens=PREFILL_TOKENS
    )
    if job.settings.on_gpu and most:
        rollout = rollout.model_copy(update={"cuda_graphs": "full" if arm == FULL else "piecewise"})
    engine = VllmEngine(target, rollout, section, 0)
    models.fill_chain(engine, 1)
    mode = str(engine._llm.vllm_config.compilation_config.cudagraph_mode)
    strategies = [OFF if not drafts else Strategy("eagle3", drafts) for drafts in given["drafts"]]
    for turn in range(2):
        for batch in batches:
            schedule = Schedule(strategies, batch, SETTLE, 1 if turn == 0 else given["steps"])
            requests = engines.make_requests(batch, prompt, [longest] * batch, vocab, 1.0)
            with contextlib.suppress(ScheduleDone):
                engine.generate(requests, chooser=schedule)
                raise RunError(f"batch {batch}: the rollout ended before all strategies were measured")
            for strategy, times in schedule.times.items() if turn else ():
                row = {"batch": batch, "drafts": strategy.num_tokens, "steps": len(times)}
                job.emit(arm=arm, **row, milliseconds=1e3 * statistics.median(times), runner="V1", cudagraph_mode=mode)
    batch = 32 if 32 in batches else max(batches)
    requests = engines.make_requests(batch, prompt, [longest] * batch, vocab, 1.0)
    for strategy in dict.fromkeys((strategies[0], strategies[-1])):
        _profile(job, engine, requests, strategy)


def _profile(job: Job, engine: Any, requests: Any, strategy: Any) -> None:
    """Rows of what takes the host's and the device's time in a step, and a trace of some steps for a viewer."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if job.settings.on_gpu else [])]
    profiler = profile(activities=activities)
    with contextlib.suppress(ScheduleDone):
        engine.generate(requests, chooser=_Profiled(strategy, len(requests), profiler))
    profiler.stop()
    device = "self_device_time_total"
    events = [event for event in profiler.key_averages() if event.self_cpu_time_total or getattr(event, device)]
    host = sum(event.self_cpu_time_total for event in events) / PROFILED
    row = {"profile": job.given["arm"], "batch": len(requests), "drafts": strategy.num_tokens}
    job.emit(**row, host_ms=host / 1e3, device_ms=sum(getattr(event, device) for event in events) / PROFILED / 1e3)
    for side, key in (("host", "self_cpu_time_total"), ("device", device)):
        for event in sorted(events, key=lambda event: -getattr(event, key))[:PROFILE_ROWS]:
            each = {"calls": event.count / PROFILED, "milliseconds": getattr(event, key) / PROFILED / 1e3}
            if each["milliseconds"]:
                job.emit(**row, side=side, operation=event.key[:80], **each)
    name = f"steps-{job.given['arm'].replace(' ', '-')}-{strategy.name}.trace.json.gz"
    profiler.export_chrome_trace(str(job.out / name))


class _Profiled:
    """Profiles ``PROFILED`` steps of one strategy, some steps after it has settled, and then ends the rollout."""

    def __init__(self, strategy: Any, batch: int, profiler: Any) -> None:
        self._strategy, self._batch, self._profiler, self._seen = strategy, batch, profiler, 0

    def next(self, batch: int, requests: Any) -> tuple[Any, None]:
        """See ``StrategyChooser.next``."""
        return self._strategy, None

    def observe(self, step: Any) -> None:
        """Counts the steps in which all requests decode.

        Raises:
            ScheduleDone: all are profiled.
        """
        if step.batch != self._batch or step.had_prefill:
            return
        self._seen += 1
        if self._seen == SETTLE:
            self._profiler.start()
        if self._seen == SETTLE + PROFILED:
            raise ScheduleDone


class ScheduleDone(Exception):
    """All strategies of a schedule are measured: ends the rollout."""


class Schedule:
    """A ``StrategyChooser``: ``settle + steps`` steps per strategy in which all ``batch`` requests have all drafts.

    ``times`` has the durations (s) of steps that verified and made the strategy's drafts, without the first ones.
    """

    def __init__(self, strategies: list[Any], batch: int, settle: int, steps: int) -> None:
        self._left, self._batch, self._settle, self._steps = list(strategies), batch, settle, steps
        self._seen = 0
        self.times: dict[Any, list[float]] = {}

    def next(self, batch: int, requests: Any) -> tuple[Any, None]:
        """See ``StrategyChooser.next``."""
        return self._left[0], None

    def observe(self, step: Any) -> None:
        """Counts a step.

        Raises:
            ScheduleDone: no strategy is left.
        """
        current = self._left[0]
        if step.batch != self._batch or step.had_prefill or {step.strategy, step.next_strategy} != {current}:
            return
        if step.num_draft_tokens != step.batch * current.num_tokens:
            return
        self._seen += 1
        if self._seen > self._settle:
            self.times.setdefault(current, []).append(step.duration)
        if self._seen == self._settle + self._steps:
            self._left.pop(0)
            self._seen = 0
            if not self._left:
                raise ScheduleDone


def judge(result: BenchmarkResult, rows: Rows) -> None:
    """Step times of an engine of ours without drafts against stock's, the worst batch's median over repeats."""
    stock, off = plain_times(rows.get(STOCK, [])), plain_times(rows.get(OFF_ARM, []))
    shared = sorted(stock.keys() & off.keys())
    if shared:
        worst = min(statistics.median(stock[batch]) / statistics.median(off[batch]) for batch in shared)
        result.target("speed of off over stock, worst batch", worst, ">=", 0.98)
    for arm in (PIECEWISE, FULL):
        able = plain_times(rows.get(arm, []))
        shared = sorted(stock.keys() & able.keys())
        if shared:
            worst = min(statistics.median(stock[batch]) / statistics.median(able[batch]) for batch in shared)
            result.target(f"speed of {arm} without drafts over stock, worst batch", worst, ">=", 0.98)


def plain_times(repeats: list[list[dict[str, Any]]]) -> dict[int, list[float]]:
    """Milliseconds of steps without drafts by batch, one per repeat."""
    found: dict[int, list[float]] = {}
    for row in (row for repeat in repeats for row in repeat if row["drafts"] == 0 and "profile" not in row):
        found.setdefault(row["batch"], []).append(row["milliseconds"])
    return found

"""A run folder as a real run would leave it, made of random numbers and the real writers."""

from __future__ import annotations

import fnmatch
from pathlib import Path
from typing import Any

import numpy as np

from megatron_tlt.config.loader import RESOLVED, dump_resolved
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.observe.environment import describe_environment
from megatron_tlt.observe.jsonl import JsonLinesFile
from megatron_tlt.observe.metrics import LENGTH_CLASSES, MetricsWriter, read_metrics
from megatron_tlt.observe.samples import SampleLog, SampleRow
from megatron_tlt.observe.summary import (
    SUMMARY_KEYS,
    describe_lengths,
    flatten,
    reward_summary,
    time_totals,
    tokens_per_s,
    write_summary,
)
from megatron_tlt.observe.timeline import ENGINE_TRACK, Timeline, write_trace

RANKS = 2
TASKS = ("basic_arithmetic", "chain_sum")


def make_run(folder: Path, steps: int = 24, seed: int = 0) -> Path:
    """Fill ``folder`` with metrics, lengths, a timeline of RANKS ranks, a summary and a config."""
    random = np.random.default_rng(seed)
    timelines = [Timeline(rank, folder) for rank in range(RANKS)]
    lengths_file = JsonLinesFile(folder / "lengths.jsonl")
    samples = SampleLog(folder, -1)
    every_length: list[int] = []
    with MetricsWriter(folder, tensorboard=False) as metrics:
        clock = timelines[0].now()
        metrics.log(0, _evaluation(0.21, random))
        for step in range(1, steps + 1):
            done = step / steps
            lengths = np.clip(random.lognormal(3.6 + 0.3 * done, 0.75, 256), 4, 512).astype(int)
            every_length += lengths.tolist()
            acceptance = np.clip(random.normal(1.6 + 0.4 * done, 0.35, 256), 1, 4)
            times = dict(
                zip(("rollout", "reward", "log_probs", "update", "reshard"), random.normal(1, 0.06, 5), strict=True)
            )
            for name, scale in (
                ("rollout", 6.5),
                ("reward", 0.25),
                ("log_probs", 1.6),
                ("update", 4.2),
                ("reshard", 0.4),
            ):
                times[name] *= scale
            idle = random.uniform(0.8, 2.2)
            clock = _step_events(timelines, step, clock, times, idle, random)
            reward = 0.2 + 0.45 / (1 + np.exp(-6 * (done - 0.45))) + random.normal(0, 0.02)
            values = {
                "reward/mean": reward,
                "reward/correct": reward - 0.03,
                "length/mean": lengths.mean(),
                "length/median": np.median(lengths),
                "length/max": lengths.max(),
                **{f"time/{name}": seconds for name, seconds in times.items()},
                "time/idle": idle / RANKS,
                "time/total": sum(times.values()) + 0.3,
                "speculation/acceptance_length": acceptance.mean(),
                "speculation/drafter_version": step * 20,
                "speculation/rollout_s": times["rollout"],
                "speculation/suffix_mib": 0.25 * step,
                "speculation/acceptance_length_suffix": 1.5,
                "speculation/gain_coverage": 1.0,
                **(
                    {"speculation/plain_rollout_s": times["rollout"] * 1.4, "speculation/gain": 1.4} if step > 2 else {}
                ),
                **{f"speculation/accepted_at_{at}": (0.3 + 0.4 * done) / at for at in (1, 2, 3)},
                **{
                    f"speculation/acceptance_length_{kind}": acceptance.mean() + at
                    for at, kind in enumerate(LENGTH_CLASSES)
                },
                "mismatch/mean_abs": 2e-3 * random.lognormal(0, 0.2),
                "mismatch/max_abs": 4e-2 * random.lognormal(0, 0.5),
                "mismatch/k3_kl": 6e-6 * random.lognormal(0, 0.4),
                "actor/loss": random.normal(0, 0.01),
                "actor/grad_norm": 0.8 * random.lognormal(0, 0.2),
                "actor/entropy": 1.1 - 0.5 * done + random.normal(0, 0.02),
                "actor/kl": 0.02 * done if step > 1 else float("nan"),
                "actor/clip_fraction": abs(random.normal(0.01, 0.004)),
                "actor/lr": 1e-4 * min(1.0, step / 4),
                "rollout/tokens_per_s": lengths.sum() / times["rollout"],
                "memory/peak_gib": 6.1 + 0.4 * done,
            }
            for at, task in enumerate(TASKS):
                figures = {"responses": 128, "reward": reward + 0.1 * at, "length_mean": lengths.mean() + 9 * at}
                values |= {f"task/{task}/{name}": value for name, value in figures.items()}
            if step % 6 == 0:
                values |= _evaluation(0.21 + 0.36 * done, random)
            metrics.log(step, {name: float(value) for name, value in values.items()})
            finished = int((lengths < 512).sum())
            reasons = {"stop": finished, "length": len(lengths) - finished}
            row = {"step": step, "lengths": lengths.tolist(), "finish_reasons": reasons}
            lengths_file.append([row | {"acceptance": acceptance.round(3).tolist()}])
            samples.add(step, _samples("train", step))
            if step % 6 == 0:
                samples.add_evaluation(step, _samples("evaluation", step))
    lengths_file.close()
    samples.close()
    for timeline in timelines:
        timeline.close()
    write_trace(folder)
    rows = read_metrics(folder / "metrics.jsonl")
    summary = _summary(rows, every_length, steps)
    assert undocumented_keys(summary) == []
    write_summary(folder / "summary.json", summary)
    tasks = [{"name": TASKS[0], "params": {"min_terms": 2}}, {"name": TASKS[1]}]
    config = TltConfig.model_validate({"run": {"name": "quickstart-cpu"}, "model": {"recipe": {}}, "tasks": tasks})
    (folder / RESOLVED).write_text(dump_resolved(config))
    return folder


def _evaluation(level: float, random: np.random.Generator) -> dict[str, float]:
    level += random.normal(0, 0.01)
    by_task = {f"task/{task}/eval_pass_at_1": level for task in TASKS}
    return by_task | {"eval/pass_at_1": level, "eval/pass_at_k": min(1.0, level + 0.2), "eval/greedy": level + 0.04}


def undocumented_keys(summary: dict[str, Any]) -> list[str]:
    """The dotted keys of a summary that SUMMARY_KEYS does not explain."""
    return [key for key in flatten(summary) if not any(fnmatch.fnmatchcase(key, known) for known in SUMMARY_KEYS)]


def _samples(origin: str, step: int) -> list[SampleRow]:
    """Two responses per task."""
    return [
        {
            "origin": origin,
            "task": task,
            "problem": f"{task}/{origin}/0/{step}",
            "sample": 0,
            "chosen": chosen,
            "reward": float(chosen == ["best"]),
            "correct": chosen == ["best"],
            "extracted": "4" if chosen == ["best"] else None,
            "answer": "4",
            "error": None,
            "prompt_length": 6,
            "length": 3 + step,
            "finish_reason": "stop" if chosen == ["best"] else "length",
            "acceptance_length": 1.5,
            "prompt": "sum 1+3\n",
            "response": f"<{origin} {task} {step} {chosen[0]}>\n#### 4</s>",
            "cut": {},
        }
        for task in TASKS
        for chosen in (["best"], ["worst", "longest"])
    ]


def _step_events(
    timelines: list[Timeline],
    step: int,
    clock: float,
    times: dict[str, float],
    idle: float,
    random: np.random.Generator,
) -> float:
    """Add one step to the ranks' timelines; return when it ended."""
    for rank, timeline in enumerate(timelines):
        timeline.begin_step(step)
        waits = idle if rank == step % RANKS else 0.0
        timeline.add("rollout", clock, times["rollout"], responses=128)
        if waits:
            timeline.add("idle", clock + times["rollout"] - waits, waits)
        ends = np.sort(random.lognormal(0, 0.75, 64))
        ends = ends / ends[-1] * (times["rollout"] - waits)
        timeline.counter("running", 64, at=clock)
        for count, end in enumerate(ends):
            timeline.counter("running", 63 - count, at=clock + end)
        for begin, end, strategy, batch in (
            (0.0, 0.4, "off", 64),
            (0.4, 0.7, "suffix-3", 24),
            (0.7, 1.0, "eagle-5", 4),
        ):
            seconds = (times["rollout"] - waits) * (end - begin) * 0.999
            at = clock + (times["rollout"] - waits) * begin
            shown = {"rollout": step, "batch": batch, "ms_per_step": 8.0, "tokens_per_request": 1.0 + 2 * begin}
            timeline.add(strategy, at, seconds, ENGINE_TRACK, track=ENGINE_TRACK, **shown)
        if rank == 0:
            timeline.add("verify", clock + 1.0, times["rollout"] - 0.5, "reward", track="verifiers")
        at = clock + times["rollout"]
        for name in ("reward", "log_probs", "update", "reshard"):
            timeline.add(name, at, times[name])
            at += times[name]
        if step % 6 == 0:
            timeline.add("evaluate", at, 2.5)
            timeline.add("checkpoint", at + 2.5, 0.6)
        timeline.flush()
    return at + (3.2 if step % 6 == 0 else 0.1)


def _summary(rows: list[dict[str, float | None]], lengths: list[int], steps: int) -> dict[str, object]:
    evaluations = [row for row in rows if "eval/pass_at_1" in row]

    def evaluation(row: dict[str, float | None]) -> dict[str, object]:
        named = {key: row[f"eval/{key}"] for key in ("pass_at_1", "pass_at_k", "greedy")}
        return {**named, "problems": 200, "samples": 4}

    return {
        "world_size": RANKS,
        "steps": steps,
        "actor": {"backend": "megatron-core", "layout": {"tensor": 1, "pipeline": 1, "data": 2}},
        "rollout": {
            "backend": "vllm",
            "tensor_parallel_size": 1,
            "length": describe_lengths(lengths),
            "acceptance_length": 1.81,
            "tokens_per_s": tokens_per_s(rows),
            "logprob_mismatch": {"mean_abs": 2.1e-3, "max_abs": 0.11, "k3_kl": 6.2e-6},
        },
        "eval": {"start": evaluation(evaluations[0]), "end": evaluation(evaluations[-1])},
        "reshard": {"tensors": 51, "verified_tensors": 51, "seconds": 0.4},
        "time": time_totals(rows),
        "memory": {"peak_gib": 6.5},
        "reward": reward_summary(rows),
        "speculation": {"enabled": True, "drafter": "ngram", "num_speculative_tokens": 3},
        "environment": describe_environment(),
    }

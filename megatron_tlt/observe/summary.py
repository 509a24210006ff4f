"""``summary.json``: the results of a run for benchmarks, CI and the report, under stable keys."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_tlt.errors import RunError
from megatron_tlt.observe.jsonl import finite
from megatron_tlt.platform.files import atomic_write_text

SUMMARY_FILE = "summary.json"

_EVALUATION = {
    "pass_at_1": "share of sampled responses that are correct, averaged over the held-out problems",
    "pass_at_k": "share of problems with at least one correct response among the samples",
    "maj_at_k": "share of problems whose most frequent answer among the samples is correct, or null without answers",
    "best_of_k": "highest reward among the samples, averaged over the held-out problems",
    "greedy": "share of problems whose greedy response is correct",
    "problems": "number of held-out problems",
    "samples": "sampled responses per problem (the k of pass_at_k)",
    "pass_at_1_by_task.*": "pass_at_1 of each task's problems",
    "sets.*": "the same figures on each data set of evaluation.sets",
}
_TIMES = {
    "total": "all steps, evaluations and checkpoints",
    "rollout": "decoding, until the slowest rank ends",
    "idle": "waiting for the slowest rank during rollout, mean over ranks",
    "reward": "waiting for verifiers after decoding",
    "log_probs": "the actor's (and the reference's) log-probabilities",
    "update": "forward, backward and optimizer",
    "reshard": "weights from the actor to the engines, including checks",
    "evaluate": "held-out evaluation",
    "checkpoint": "saving",
}

SUMMARY_KEYS: dict[str, str] = {
    "world_size": "processes, one per device",
    "steps": "optimizer steps done, including those before a resume",
    "tokens_seen": "prompt and response tokens trained on; a prompt counts once for each of its responses",
    "actor.backend": "the training library",
    "actor.layout.*": "parallel sizes: tensor, pipeline, data, context, expert",
    "rollout.backend": "the inference library",
    "rollout.tensor_parallel_size": "devices per engine",
    **{f"eval.start.{key}": f"before the first step: {text}" for key, text in _EVALUATION.items()},
    **{f"eval.end.{key}": f"after the last step: {text}" for key, text in _EVALUATION.items()},
    "rollout.length.median": "tokens per response over the whole run",
    "rollout.length.p90": "tokens",
    "rollout.length.p99": "tokens",
    "rollout.length.max": "tokens",
    "rollout.length.mean": "tokens",
    "rollout.length.max_over_median": "longest over median length",
    "rollout.acceptance_length": "tokens per decode step and request, including the bonus token (1.0 = no gain)",
    "rollout.tokens_per_s": "generated tokens of all ranks over rollout time",
    "rollout.logprob_mismatch.mean_abs": "mean |actor - rollout| log-probability per token",
    "rollout.logprob_mismatch.max_abs": "largest |actor - rollout| of any token",
    "rollout.logprob_mismatch.k3_kl": "k3 estimate of KL(rollout || actor) per token",
    "reshard.tensors": "tensors sent in one synchronization",
    "reshard.verified_tensors": "of these, the number that every engine verified",
    "reshard.seconds": "median duration of the phase: wake-up, transfer, freeing memory",
    "reshard.transfer_seconds": "median duration of its transfer, including checks",
    "reshard.sent_mib": "MiB from rank to rank in one synchronization, including checksums",
    "reshard.lower_bound_mib": "MiB that ranks need and do not hold",
    "reshard.staging_mib": "MiB of buffers on the rank with the most",
    **{f"time.{key}": f"seconds over the whole run: {text}" for key, text in _TIMES.items()},
    "memory.peak_gib": "largest total over all ranks: on CPUs resident memory with verifiers, else device memory",
    "memory.over_plan": "highest device memory in the first step over what tlt plan computes, by phase; null on CPUs",
    "reward.first": "mean training reward of the first step",
    "reward.last": "mean training reward of the last step",
    "reward.mean": "mean training reward over all steps",
    "learning.warnings": "number of warnings about a cause that prevents learning",
    "speculation.enabled": "whether rollout speculated",
    "speculation.drafter": "kind of drafter",
    "speculation.num_speculative_tokens": "draft tokens per step",
    "speculation.gain": "estimated rollout time without speculation over measured time, or null",
    "speculation.gain_steps": "steps in which the gain is known",
    "speculation.gain_unknown": "why the gain is unknown, or null",
    "speculation.frozen_acceptance_length": "teacher-forced, of the drafter from the start of the run (last step)",
    "speculation.adapted_acceptance_length": "the same for the trained drafter, on the same responses",
    "speculation.warnings": "number of warnings about an unused drafter",
    "environment.*": "describe_environment(): versions and hardware",
}
"""Dotted key -> meaning; ``*`` stands for any further keys. Keys may be added; none changes its meaning."""


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"a": {"b": 1}}`` -> ``{"a.b": 1}``; lists are values, an empty mapping disappears."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        path = f"{prefix}.{key}" if prefix else str(key)
        flat |= flatten(value, path) if isinstance(value, Mapping) else {path: value}
    return flat


def write_summary(path: Path | str, summary: Mapping[str, Any]) -> None:
    """Writes the nested ``summary`` as JSON, atomically; NaN and infinities become null.

    Raises:
        RunError: the disk is full.
    """
    atomic_write_text(path, json.dumps(finite(summary), indent=2, allow_nan=False, ensure_ascii=False) + "\n")


def read_summary(path: Path | str) -> dict[str, Any]:
    """The nested summary; raises RunError if the file is missing or not a JSON object."""
    try:
        summary = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"cannot read {path}: {error}") from error
    if not isinstance(summary, dict):
        raise RunError(f"{path}: must be a JSON object, found {type(summary).__name__}")
    return summary


def describe_lengths(lengths: Sequence[int]) -> dict[str, float]:
    """``rollout.length.*`` for response lengths in tokens; empty without lengths."""
    if len(lengths) == 0:
        return {}
    values = np.asarray(lengths, dtype=np.float64)
    median, p90, p99 = (float(v) for v in np.percentile(values, [50, 90, 99]))
    largest = float(values.max())
    return {
        "median": median,
        "p90": p90,
        "p99": p99,
        "max": largest,
        "mean": float(values.mean()),
        "max_over_median": largest / median if median else float("nan"),
    }


def time_totals(rows: Sequence[Mapping[str, float | None]]) -> dict[str, float]:
    """``time.*`` as sums of the ``time/*`` metrics of all rows, in seconds; 0 for phases never timed."""
    totals = dict.fromkeys(_TIMES, 0.0)
    for row in rows:
        for key, value in row.items():
            if key.startswith("time/") and value is not None:
                totals[key.removeprefix("time/")] = totals.get(key.removeprefix("time/"), 0.0) + value
    return totals


def tokens_per_s(rows: Sequence[Mapping[str, float | None]]) -> float | None:
    """``rollout.tokens_per_s``: generated tokens of all steps over their rollout time; None if not measured."""
    rates = [(rate, row.get("time/rollout")) for row in rows if (rate := row.get("rollout/tokens_per_s")) is not None]
    measured = [(rate * seconds, seconds) for rate, seconds in rates if seconds]
    tokens, seconds = (sum(column) for column in zip(*measured, strict=True)) if measured else (0.0, 0.0)
    return tokens / seconds if seconds else None


def reward_summary(rows: Sequence[Mapping[str, float | None]]) -> dict[str, float]:
    """``reward.*`` from the ``reward/mean`` metric; empty if no row has it."""
    values = [value for row in rows if (value := row.get("reward/mean")) is not None]
    return {"first": values[0], "last": values[-1], "mean": sum(values) / len(values)} if values else {}

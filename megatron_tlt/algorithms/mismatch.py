"""The difference between the rollout's log-probabilities and the actor's for the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_tlt.config.schema import MismatchConfig
from megatron_tlt.errors import RunError


@dataclass(frozen=True)
class Mismatch:
    """Over all response tokens of a step: mean and maximum absolute difference (nats), k3 estimate of KL."""

    mean_abs: float
    max_abs: float
    k3_kl: float


def measure_mismatch(rollout: Sequence[Sequence[float]], actor: Sequence[Sequence[float]]) -> Mismatch:
    """Compares log-probs response by response.

    Raises:
        ValueError: two columns of one response differ in length.
    """
    for index, (a, b) in enumerate(zip(rollout, actor, strict=True)):
        if len(a) != len(b):
            raise ValueError(f"response {index}: {len(a)} rollout log-probs, {len(b)} of the actor")
    rollout_flat = np.concatenate([np.asarray(row, dtype=np.float64) for row in rollout])
    actor_flat = np.concatenate([np.asarray(row, dtype=np.float64) for row in actor])
    log_ratio = actor_flat - rollout_flat
    return Mismatch(
        mean_abs=float(np.abs(log_ratio).mean()),
        max_abs=float(np.abs(log_ratio).max()),
        k3_kl=float((np.expm1(log_ratio) - log_ratio).mean()),
    )


def truncated_importance_weights(
    rollout: Sequence[float], actor: Sequence[float], truncation: float
) -> tuple[float, ...]:
    """Per token min(pi_actor / pi_rollout, truncation): corrects for sampling from a slightly different policy."""
    log_ratio = np.asarray(actor, dtype=np.float64) - np.asarray(rollout, dtype=np.float64)
    # bounded before exp, which overflows
    return tuple(float(w) for w in np.exp(np.minimum(log_ratio, np.log(truncation))))


def enforce(mismatch: Mismatch, config: MismatchConfig, step: int) -> None:
    """Stops the run where the configuration asks for it.

    Raises:
        RunError: ``action`` is ``fail`` and the mean absolute difference is above ``threshold`` (or not a number).
    """
    if config.action == "fail" and not mismatch.mean_abs <= config.threshold:
        raise RunError(
            f"step {step}: rollout and actor log-probs differ by {mismatch.mean_abs:.4g} nats on average; "
            f"allowed by algorithm.mismatch.threshold: {config.threshold:g}"
        )

"""Tuners by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from megatron_tlt.speculation.strategy import Strategy
from megatron_tlt.speculation.tuner import Tuner
from megatron_tlt.speculation.tuner_beg_mab import BegMabOptions, BegMabTuner
from megatron_tlt.speculation.tuner_solver import SolverOptions, SolverTuner
from megatron_tlt.speculation.tuner_static import StaticOptions, StaticTuner

TUNERS: dict[str, tuple[Any, Any]] = {
    "beg_mab": (BegMabTuner, BegMabOptions),
    "solver": (SolverTuner, SolverOptions),
    "static": (StaticTuner, StaticOptions),
}
"""Name to (class, options class). The oracle, which knows the true step times, is built by benchmarks only."""


def build_tuner(
    name: str,
    strategies: Sequence[Strategy],
    options: Mapping[str, Any] | None = None,
    seed: int = 0,
    *,
    max_batch: int,
) -> Tuner:
    """Build the named tuner over ``strategies`` for batches up to ``max_batch``, the largest that may speculate.

    Raises:
        ValueError: an unknown name or option, or a value out of range; the message lists what is allowed.
    """
    if name not in TUNERS:
        raise ValueError(f"tuner {name!r}: allowed are {', '.join(sorted(TUNERS))}")
    tuner, own = TUNERS[name]
    allowed = [field.name for field in fields(own)]
    unknown = sorted(set(options or {}) - set(allowed))
    if unknown:
        raise ValueError(f"tuner {name}: unknown option {', '.join(unknown)}; allowed are {', '.join(allowed)}")
    try:
        built: Tuner = tuner(strategies, own(**(options or {})), seed, max_batch=max_batch)
    except TypeError as error:
        raise ValueError(f"tuner {name}: an option has the wrong type: {error}") from error
    return built

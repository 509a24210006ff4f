"""Validation of tuners' options and states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_tlt.speculation.strategy import Strategy


def check_at_least(of: str, least: float, **values: float | None) -> None:
    """
    Raises:
        ValueError: a value (other than None) is below ``least``; it names both ``of`` and the option.
    """
    for name, value in values.items():
        if value is not None and not value >= least:
            raise ValueError(f"{of}: {name} is {value}; allowed: {least} and more")


def check_one_of(tuner: str, allowed: Sequence[str], **values: str) -> None:
    """
    Raises:
        ValueError: a value is none of ``allowed``; it names the tuner and the option.
    """
    for name, value in values.items():
        if value not in allowed:
            raise ValueError(f"tuner {tuner}: {name} is {value!r}; allowed: {', '.join(allowed)}")


def check_state(state: Mapping[str, Any], tuner: str, strategies: Sequence[Strategy]) -> None:
    """
    Raises:
        ValueError: ``state`` is from another tuner or other strategies.
    """
    if state.get("tuner") != tuner:
        raise ValueError(f"tuner {tuner}: the state is of tuner {state.get('tuner')!r}")
    names = [strategy.name for strategy in strategies]
    if state.get("strategies") != names:
        raise ValueError(f"tuner {tuner}: the state is over {state.get('strategies')}; allowed: {names}")

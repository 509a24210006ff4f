"""Judges each update by the norm of its gradient and by its loss, before anything is changed; pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from megatron_tlt.config.guard import GuardConfig

Decision = Literal["accept", "warn", "skip", "go_back", "stop"]


@dataclass(frozen=True)
class Verdict:
    """What follows an update.

    Args:
        decision: ``accept`` and ``warn`` apply it.
        norm: of its gradient, before clipping.
        loss: mean of its batch.
        median: of the norms that it was compared with; None: too few are known.
        why: what is wrong with it; empty if nothing is.
    """

    decision: Decision
    norm: float
    loss: float
    median: float | None = None
    why: str = ""

    @property
    def is_applied(self) -> bool:
        return self.decision in ("accept", "warn")


@dataclass
class _State:
    """``updates`` judged so far; the last of them that was bad; bad ones without progress; norms; returns."""

    updates: int = 0
    last_bad: int = 0
    in_a_row: int = 0
    norms: list[float] = field(default_factory=list)
    returns: int = 0


class UpdateGuard:
    """Decides by the settings of ``guard`` and by the updates before.

    Bad updates follow *in a row* unless the run applies an update later than all bad ones, counted from its start: a
    run that goes back again and again before the same update makes no progress.
    """

    def __init__(self, settings: GuardConfig) -> None:
        self._settings = settings
        self._state = _State()

    @property
    def returns(self) -> int:
        """How often the run has gone back."""
        return self._state.returns

    @property
    def median(self) -> float | None:
        """Of the last applied updates' norms; None if less than half of ``spike_window`` are known.

        Norms of 0 do not count: where all rewards of a step are the same, it has no gradient.
        """
        norms, window = self._state.norms, self._settings.spike_window
        return statistics.median(norms) if len(norms) >= (window + 1) // 2 else None

    def judge(self, norm: float, loss: float, *, may_go_back: bool = True) -> Verdict:
        """The verdict on the next update; without ``may_go_back`` an update is skipped instead.

        Ranks with the same numbers and settings decide alike.
        """
        settings, state = self._settings, self._state
        median, decision, why = self.median, "accept", ""
        if not (math.isfinite(norm) and math.isfinite(loss)):
            decision, why = settings.on_nonfinite, "gradient or loss is not finite"
        elif settings.spike_factor is not None and median is not None and norm > settings.spike_factor * median:
            decision, why = settings.on_spike, f"gradient norm exceeds {settings.spike_factor:g} times the median"
        if decision == "go_back" and not may_go_back:
            decision, why = "skip", f"{why}; there is no checkpoint to go back to"
        state.updates += 1
        if decision in ("skip", "go_back"):
            state.in_a_row += 1
            state.last_bad = max(state.last_bad, state.updates)
            if state.in_a_row >= settings.most_in_a_row:
                decision, why = "stop", f"{why}; {state.in_a_row} bad updates in a row, guard.most_in_a_row"
        verdict = Verdict(decision, norm, loss, median, why)  # type: ignore[arg-type]
        if verdict.is_applied:
            state.norms = [*state.norms, norm][-settings.spike_window :] if norm > 0 else state.norms
            if state.updates > state.last_bad:
                state.in_a_row = 0
        return verdict

    def restore(self, saved: Mapping[str, Any] | None, updates: int) -> None:
        """Continues from the :attr:`state` of a checkpoint after so many ``updates``.

        None: the run that wrote it had no guard, so no norms are known.
        """
        self._state = _State(**saved) if saved is not None else _State(updates=updates)

    def go_back(self, saved: Mapping[str, Any] | None, updates: int) -> None:
        """As :meth:`restore`, but what went wrong since is not forgotten."""
        since = self._state
        self.restore(saved, updates)
        self._state.in_a_row, self._state.last_bad = since.in_a_row, since.last_bad
        self._state.returns = since.returns + 1

    @property
    def state(self) -> dict[str, Any]:
        """What :meth:`restore` needs, as plain data."""
        return asdict(self._state)

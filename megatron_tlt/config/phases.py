"""The phases of a run, each of which has a limit of time, and the order of all limits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Literal, get_args

Phase = Literal[
    "start", "rollout", "log-probs", "update", "drafter", "reshard", "evaluate", "checkpoint", "snapshot", "export"
]
PHASES: tuple[Phase, ...] = get_args(Phase)
"""What a rank does one after another, from its start to the export of the trained model."""
_AFTER_PHASES_S = 600
"""From a phase's limit to NCCL's: in it, all ranks write where they are, and the run ends."""


def limits_of_phases(default: int | None, own: Mapping[Phase, int]) -> dict[str, float]:
    """Seconds by phase: its ``own`` limit or the ``default``, infinite where that is None."""
    limits = {phase: own.get(phase, default) for phase in PHASES}
    return {phase: math.inf if limit is None else float(limit) for phase, limit in limits.items()}


def nccl_timeout(collective_timeout_s: int, limits_s: Iterable[float]) -> int:
    """Seconds after which torch's watchdog ends a process that waits in a collective of NCCL.

    It names neither ranks nor phase. So it comes after each phase's limit, whose error does, and is a collective's own
    limit only where no phase has one.
    """
    return max([collective_timeout_s, *(int(limit) + _AFTER_PHASES_S for limit in limits_s if math.isfinite(limit))])

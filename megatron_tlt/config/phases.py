"""The phases of a run, each of which has a limit of time."""

from __future__ import annotations

from typing import Literal, get_args

Phase = Literal[
    "start", "rollout", "log-probs", "update", "drafter", "reshard", "evaluate", "checkpoint", "snapshot", "export"
]
PHASES: tuple[Phase, ...] = get_args(Phase)
"""What a rank does one after another, from its start to the export of the trained model."""

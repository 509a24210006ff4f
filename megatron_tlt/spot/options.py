"""The coordinator's own settings."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class CoordinatorConfig:
    """When sessions start, and how long anybody is waited for (seconds).

    A session needs ``min_replicas`` all along and, to start, ``min_entries`` buffered responses among them. Members
    may train ``steps_ahead`` steps beyond what all have reported; with 2 they need not wait for the answer.
    Ranks report every ``heartbeat_s``; one that is not heard for ``lost_after_s`` is lost. A session without a step for
    ``session_timeout_s`` is ended. Who has not left ``preempt_timeout_s`` after being told to takes no part in sessions
    for the rest of the RL step. A coordinator not heard for ``silent_after_s`` is silent: its sessions are left.

    Raises:
        ValueError: a value outside its bounds.
    """

    min_replicas: int = 2
    min_entries: int = 1
    steps_ahead: int = 2
    heartbeat_s: float = 0.5
    lost_after_s: float = 10.0
    session_timeout_s: float = 60.0
    preempt_timeout_s: float = 5.0
    silent_after_s: float = 10.0

    def __post_init__(self) -> None:
        for name, least in (("min_replicas", 1), ("min_entries", 0), ("steps_ahead", 1)):
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"{name} is {value}; allowed: {least} and more")
        for name in ("heartbeat_s", "session_timeout_s", "preempt_timeout_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value}; allowed: above 0")
        # one lost heartbeat is no lost rank
        for name in ("lost_after_s", "silent_after_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 2 * self.heartbeat_s):
                raise ValueError(f"{name} is {value}; allowed: twice heartbeat_s, {2 * self.heartbeat_s}, and more")

"""An environment for a policy of letters: three turns, of which it gives an account."""

from __future__ import annotations

import json

from megatron_tlt.environments.interface import Observation
from megatron_tlt.tasks.types import Problem


class Letters:
    def reset(self, problem: Problem, seed: int) -> None:
        self._turns: list[str] = []

    def step(self, turn: str) -> Observation:
        self._turns.append(turn)
        if len(self._turns) < 3:
            return Observation("ab" * len(self._turns))
        return Observation(None, {"value": 0.5, "correct": True, "extracted": json.dumps(self._turns)})

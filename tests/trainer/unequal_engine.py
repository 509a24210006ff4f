"""vLLM with engines that are unequally fast, so that a rollout has a bubble."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from megatron_tlt.platform.device import rank
from megatron_tlt.rollout.types import Request, Response
from megatron_tlt.rollout.vllm_engine import VllmEngine
from megatron_tlt.speculation.strategy import StepRecord


class UnequalEngine(VllmEngine):
    """Waits ``seconds`` after each step on rank 1."""

    def __init__(self, *arguments: Any, seconds: float) -> None:
        super().__init__(*arguments)
        self._seconds = seconds

    def generate(
        self,
        requests: Sequence[Request],
        on_finished: Callable[[Response], None] | None = None,
        on_step: Callable[[StepRecord], None] | None = None,
        *more: Any,
        **others: Any,
    ) -> list[Response]:
        def stepped(record: StepRecord) -> None:
            if rank() == 1:
                time.sleep(self._seconds)
            if on_step is not None:
                on_step(record)

        return super().generate(requests, on_finished, stepped, *more, **others)

"""An engine without a model: random tokens, with log-probs that blow up the gradient in given rollouts."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_tlt.platform.device import rank
from megatron_tlt.rollout.interface import Capabilities, RolloutEngine
from megatron_tlt.rollout.types import Request, Response
from megatron_tlt.speculation.strategy import OFF, StepRecord


class BadEngine(RolloutEngine):
    """``bad`` rollouts, counted from 1 in this process, are impossible under the policy on rank 1.

    ``slow_s``: seconds that rank 1 takes longer for each response. In ``stopped`` rollouts each rank receives SIGTERM,
    in ``killed`` ones rank 1 SIGKILL.
    """

    capabilities = Capabilities(sleep=True)

    def __init__(
        self,
        model_path: Path,
        *_: Any,
        bad: Sequence[int] = (),
        slow_s: float = 0.0,
        stopped: Sequence[int] = (),
        killed: Sequence[int] = (),
    ) -> None:
        self._vocab_size = int(json.loads((model_path / "config.json").read_text())["vocab_size"])
        self._bad, self._slow_s, self._stopped, self._killed, self._rollouts = bad, slow_s, stopped, killed, 0

    def generate(
        self, requests: Sequence[Request], on_finished: Any = None, on_step: Any = None, *_: Any, **__: Any
    ) -> list[Response]:
        self._rollouts += 1
        if self._rollouts in self._stopped:
            os.kill(os.getpid(), signal.SIGTERM)
        if self._rollouts in self._killed and rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        log_prob = -1e4 if self._rollouts in self._bad and rank() == 1 else -4.0
        began, responses = time.perf_counter(), []
        for request in requests:
            if rank() == 1:
                time.sleep(self._slow_s)
            numbers = random.Random(request.seed)
            tokens = [numbers.randrange(3, self._vocab_size) for _ in range(4 + numbers.randrange(8))]
            at = time.perf_counter() - began
            one = Response(request.request_id, request.prompt_token_ids, tokens, [log_prob] * len(tokens), "stop", at)
            responses.append(one)
            if on_step is not None:
                on_step(StepRecord(OFF, 1, 1e-3, len(tokens), had_prefill=True, start=at))
            if on_finished is not None:
                on_finished(one)
        return responses

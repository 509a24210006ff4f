"""Drafting in vLLM's second model runner, with this package's model-free drafters.

The runner keeps requests' tokens on the device and has no proposer for drafters on the host. ``TokenSpeculator`` takes
the place of its n-gram speculator: after sampling it reads the new tokens (one copy to the host per step), asks the
switch for drafts, and writes them (one copy to the device). Scheduling is synchronous, as the drafts depend on the
tokens. A request's tokens depend on its seed and positions alone, as in the first runner with ``SeededSampler``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from megatron_tlt.platform.copies import copy_to_device
from megatron_tlt.rollout.token_lookups import DraftingRow
from megatron_tlt.rollout.types import Request
from megatron_tlt.rollout.vllm_strategies import StrategySwitch
from megatron_tlt.speculation.strategy import OFF

_NUM_SAMPLED = 4
"""Place of ``num_sampled`` among the arguments of ``propose`` after the batch; a test holds it against the releases."""


class SwitchV2(StrategySwitch):
    """As ``StrategySwitch``, in the second runner; without drafter models."""

    def _install(self, runner: Any, probabilistic: bool) -> None:
        self._tokens: dict[str, list[int]] = {}  # of each request, prompt included
        self._last: tuple[list[str], list[list[int]]] = [], []
        runner.speculator.switch, runner.speculator.requests = self, runner.req_states
        runner.take_draft_token_ids = self._take

    def add(self, internal_id: str, request: Request) -> None:
        super().add(internal_id, request)
        if self._num_tokens:
            self._tokens[internal_id] = list(request.prompt_token_ids)

    def _forget(self, internal_id: str) -> None:
        if self._num_tokens:
            self._tokens.pop(internal_id, None)

    def release(self) -> None:
        """There is nothing to free."""

    def draft(self, ids: Sequence[str], sampled: Sequence[Sequence[int]]) -> list[list[int]]:
        """Drafts of the batch's requests, after the step in which they got the ``sampled`` tokens."""
        self.drafted_under = self.strategy
        drafts: list[list[int]] = [[] for _ in ids]
        rows, tokens = [], []
        for index, (internal_id, new) in enumerate(zip(ids, sampled, strict=True)):
            known = self._tokens[internal_id]
            known += new
            room = self._room(internal_id, len(known))
            limit = self._limit(internal_id, len(known), room) if new else 0
            rows.append(DraftingRow(index, internal_id, len(known), limit))
            tokens.append(known)
        if self.strategy != OFF:
            with self._drafting():
                for name in self.strategy.drafters:
                    self._look_up(name, rows, tokens, drafts)
        self._last = list(ids), drafts
        return drafts

    def _take(self) -> Any:
        """Replaces the runner's ``take_draft_token_ids``: exactly the drafts that there are."""
        from vllm.v1.outputs import DraftTokenIds

        (ids, drafts), self._last = self._last, ([], [])
        return DraftTokenIds(ids, drafts) if any(drafts) else None


def build_token_speculator(vllm_config: Any, device: torch.device, *_: Any) -> Any:
    """Replaces vLLM's ``init_speculator`` while an engine of this package is built."""
    from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

    class TokenSpeculator(BaseSpeculator):
        """Drafts by a ``SwitchV2``, which is set after the engine is built."""

        supports_mm_inputs = False
        draft_logits = None  # a draft is certain

        def __init__(self) -> None:
            spec = vllm_config.speculative_config
            size = vllm_config.scheduler_config.max_num_seqs, spec.num_speculative_tokens
            self.none = torch.full(size, -1, dtype=torch.int64, device=device)
            self.switch: SwitchV2 | None = None
            self.requests: Any = None  # the runner's states of its requests

        def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
            pass

        def capture(self) -> None:
            pass

        def propose(self, input_batch: Any, *given: Any, dummy_run: bool = False, **_: Any) -> torch.Tensor:
            count = input_batch.num_reqs
            if dummy_run or self.switch is None:
                return self.none[:count]
            new = self._sampled(input_batch, given[_NUM_SAMPLED])
            drafts = self.switch.draft(input_batch.req_ids, new)
            if not any(drafts):
                return self.none[:count].clone()
            width = self.none.shape[1]
            padded = np.array([draft + [-1] * (width - len(draft)) for draft in drafts], dtype=np.int64)
            return copy_to_device([padded], device)[0]

        def _sampled(self, input_batch: Any, num_sampled: torch.Tensor) -> list[list[int]]:
            """The tokens that each request got in this step."""
            rows_B = input_batch.idx_mapping[: input_batch.num_reqs].long()
            requests = self.requests
            ends_B1 = requests.total_len.gpu[rows_B].long()[:, None]
            width = self.none.shape[1] + 1
            places_BL = ends_B1 - width + torch.arange(width, device=device)
            tokens_BL = requests.all_token_ids.gpu[rows_B[:, None], places_BL.clamp(min=0)]
            counts_B1 = num_sampled[: input_batch.num_reqs].long()[:, None]
            found = torch.cat([counts_B1, tokens_BL.long()], dim=1).cpu().tolist()
            return [row[len(row) - count :] if count else [] for count, *row in found]

    return TokenSpeculator()


@contextmanager
def token_speculator() -> Iterator[None]:
    """Engines built in this context draft by ``TokenSpeculator``."""
    from vllm.v1.worker.gpu import model_runner

    upstream = model_runner.init_speculator
    model_runner.init_speculator = build_token_speculator
    try:
        yield
    finally:
        model_runner.init_speculator = upstream

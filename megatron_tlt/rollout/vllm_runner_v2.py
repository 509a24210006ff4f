"""Drafting in vLLM's second model runner: model-free drafters, drafter models, and pairs of them.

The runner keeps requests' tokens on the device. After sampling, the switch reads the new tokens (one copy to the host
per step), asks the model-free drafters, and writes their drafts (one copy to the device). A drafter model drafts by
vLLM's own speculator, whose number of drafts the switch sets in each step. Scheduling is synchronous, as the drafts
depend on the tokens. A request's tokens depend on its seed and positions alone, as in the first runner with
``SeededSampler``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from megatron_tlt.config.drafter_kinds import model_drafters
from megatron_tlt.config.schema import RolloutConfig
from megatron_tlt.config.speculation import SpeculationConfig
from megatron_tlt.errors import ConfigError
from megatron_tlt.platform.copies import copy_to_device
from megatron_tlt.rollout.recorded_states import Span
from megatron_tlt.rollout.token_lookups import DraftingRow
from megatron_tlt.rollout.types import Request
from megatron_tlt.rollout.vllm_head_v2 import HeadV2
from megatron_tlt.rollout.vllm_patches import draft_without_padding
from megatron_tlt.rollout.vllm_strategies import StrategySwitch
from megatron_tlt.speculation.strategy import OFF, Strategy
from megatron_tlt.speculation.token_drafter import TokenDrafter

_LAST_STATES, _AUX_STATES, _NUM_SAMPLED, _NUM_REJECTED = 2, 3, 4, 5
"""Places among the arguments of ``propose`` after the batch; a test holds them against the releases."""


class SwitchV2(StrategySwitch):
    """As ``StrategySwitch``, in the second runner.

    A drafter model processes every step's tokens, also under strategies that do not use it, so its KV cache has no
    gaps to fill later; under those it drafts nothing.
    """

    def _install(self, runner: Any, probabilistic: bool) -> None:
        self._tokens: dict[str, list[int]] = {}  # of each request, prompt included
        self._last: tuple[list[str], list[list[int]]] = [], []
        self._states = runner.req_states
        self._model_head = HeadV2(runner.speculator) if self._head_name else None
        self._propose_unswitched = runner.speculator.propose
        self._no_drafts = torch.full(
            (int(runner.max_num_reqs), self._num_tokens), -1, dtype=torch.int64, device=runner.device
        )
        runner.speculator.propose = self._propose_drafts
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

    def _propose_drafts(self, input_batch: Any, *given: Any, dummy_run: bool = False, **options: Any) -> torch.Tensor:
        """Replaces the speculator's ``propose``: drafts (requests, most tokens); ``_take`` says how many of them."""
        if dummy_run:
            unswitched: torch.Tensor = self._propose_unswitched(input_batch, *given, dummy_run=True, **options)
            return unswitched
        self.drafted_under = self.strategy
        sampled, rejected, positions = self._sampled(input_batch, given[_NUM_SAMPLED], given[_NUM_REJECTED])
        if self.recorded is not None and self.recorded.records:
            lengths = (input_batch.num_scheduled_tokens[: len(rejected)] - rejected).tolist()
            states, spans = self._step_states(input_batch, given, positions, lengths)
            self.recorded.add(states, spans)
        with self._drafting():
            rows = self._rows_after(input_batch.req_ids, sampled)
            drafts: list[list[int]] = [[] for _ in rows]
            for name in self.strategy.drafters:
                if name in self._lookups.names:
                    self._look_up(name, rows, [self._tokens[row.internal_id] for row in rows], drafts)
            tokens_RK = self._no_drafts[: len(rows)]
            lengths = [0] * len(rows)
            if self._model_head is not None and self.drafter_ready:
                if self._head_name in self.strategy.drafters:
                    lengths = [0 if drafts[row.index] else row.limit for row in rows]
                tokens_RK = self._model_head.propose(input_batch, given, options, max(lengths))
                if max(lengths) and (least := self.strategy.least_probability):
                    lengths = self._model_head.likely_counts(lengths, least)
            if any(drafts):
                tokens_RK = self._write(drafts, tokens_RK, input_batch.idx_mapping)
        # the runner has the head's tokens; the scheduler needs their number alone
        numbers = [draft or [0] * length for draft, length in zip(drafts, lengths, strict=True)]
        self._last = list(input_batch.req_ids), numbers
        return tokens_RK

    def _rows_after(self, ids: Sequence[str], sampled: Sequence[Sequence[int]]) -> list[DraftingRow]:
        rows = []
        for index, (internal_id, new) in enumerate(zip(ids, sampled, strict=True)):
            known = self._tokens[internal_id]
            known += new
            room = self._room(internal_id, len(known))
            limit = self._limit(internal_id, len(known), room) if new and self.strategy != OFF else 0
            rows.append(DraftingRow(index, internal_id, len(known), limit))
        return rows

    def _write(self, drafts: list[list[int]], tokens_RK: torch.Tensor, slots_R: torch.Tensor) -> torch.Tensor:
        """The model-free ``drafts`` in place of the head's."""
        rows = [index for index, draft in enumerate(drafts) if draft]
        padded = [drafts[row] + [-1] * (self._num_tokens - len(drafts[row])) for row in rows]
        rows_W, drafts_WK = copy_to_device([np.array(rows), np.array(padded, dtype=np.int64)], self._no_drafts.device)
        written_RK = self._no_drafts[: len(drafts)].clone()
        written_RK[:, : tokens_RK.shape[1]] = tokens_RK
        written_RK[rows_W] = drafts_WK
        if self._model_head is not None:
            self._model_head.make_certain(slots_R[rows_W].long(), drafts_WK)
        return written_RK

    def _sampled(
        self, input_batch: Any, num_sampled: torch.Tensor, num_rejected: torch.Tensor
    ) -> tuple[list[list[int]], list[int], list[int]]:
        """Of each request in this step: the tokens it got, how many of its drafts were rejected, its first position."""
        count, device = input_batch.num_reqs, self._no_drafts.device
        slots_R = input_batch.idx_mapping[:count].long()
        ends_R1 = self._states.total_len.gpu[slots_R].long()[:, None]
        width = self._num_tokens + 1
        places_RL = ends_R1 - width + torch.arange(width, device=device)
        tokens_RL = self._states.all_token_ids.gpu[slots_R[:, None], places_RL.clamp(min=0)]
        numbers_R3 = torch.stack([num_sampled[:count], num_rejected[:count], _first_positions(input_batch)], dim=1)
        found = torch.cat([numbers_R3.long(), tokens_RL.long()], dim=1).cpu().tolist()
        sampled = [row[len(row) - row[0] :] if row[0] else [] for row in found]
        return sampled, [row[1] for row in found], [row[2] for row in found]

    def _step_states(
        self, input_batch: Any, given: Sequence[Any], positions: Sequence[int], lengths: Sequence[int]
    ) -> tuple[torch.Tensor, list[Span]]:
        """What to record of a step: the head's inputs, followed by the target's states after the final norm."""
        total, aux = input_batch.num_tokens, given[_AUX_STATES]
        parts = [part[:total] for part in (*(aux or ()), given[_LAST_STATES])]
        states = torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]
        offsets = input_batch.query_start_loc_np[: input_batch.num_reqs].tolist()
        return states, list(zip(input_batch.req_ids, positions, offsets, lengths, strict=True))

    def _take(self) -> Any:
        """Replaces the runner's ``take_draft_token_ids``: exactly as many drafts as there are."""
        from vllm.v1.outputs import DraftTokenIds

        (ids, drafts), self._last = self._last, ([], [])
        return DraftTokenIds(ids, drafts) if any(drafts) else None


def _first_positions(input_batch: Any) -> torch.Tensor:
    """Of each request, the position of its first token in the step: (requests)."""
    return input_batch.positions[input_batch.query_start_loc[: input_batch.num_reqs].long()].long()


def _build_none(vllm_config: Any, device: torch.device, *_: Any) -> Any:
    """Replaces vLLM's ``init_speculator`` for an engine without a drafter model; ``SwitchV2`` drafts in its place."""
    from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

    class NoSpeculator(BaseSpeculator):
        supports_mm_inputs = False
        draft_logits = None  # a draft is certain

        def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
            pass

        def capture(self) -> None:
            pass

        def propose(self, input_batch: Any, *_: Any, **__: Any) -> torch.Tensor:
            size = input_batch.num_reqs, vllm_config.speculative_config.num_speculative_tokens
            return torch.full(size, -1, dtype=torch.int64, device=device)

    return NoSpeculator()


class AsynchronousSwitch(SwitchV2):
    """As ``SwitchV2``, where a step is scheduled before the tokens of the step before are known.

    A drafter model alone drafts, the same number of tokens for each request: those of the strategy at scheduling.
    """

    def follow(self, scheduler: Any) -> None:
        """Let ``scheduler`` reserve as many drafts per request as the strategy of the moment has.

        Raises:
            ConfigError: it has no schedule to set, so it reserves the most drafts in every step; those that a strategy
                does not make would be verified as tokens of id -1.
        """
        if self._num_tokens and scheduler.dynamic_sd_lookup is None:
            raise ConfigError(
                "rollout.async_scheduling: found true; this engine's scheduler has no schedule of draft lengths; "
                "allowed: false"
            )
        self._scheduler = scheduler
        self._started: deque[Strategy] = deque()  # of each step that has not ended, what it drafts under
        upstream = scheduler.schedule

        def schedule(*given: Any, **named: Any) -> Any:
            scheduled = upstream(*given, **named)
            if scheduled.total_num_scheduled_tokens:
                self._started.append(self.strategy)
            return scheduled

        scheduler.schedule = schedule
        if self._num_tokens:
            self.set(OFF, None)

    def set(self, strategy: Strategy, budgets: Mapping[str, int] | None) -> None:
        if strategy.by_length or strategy.least_percent or budgets:
            raise ConfigError(
                f"strategy {strategy.name}; with rollout.async_scheduling all requests have the same number of drafts"
            )
        super().set(strategy, None)
        if self._num_tokens:
            lookup = self._scheduler.dynamic_sd_lookup
            lookup[:] = [strategy.num_tokens] * len(lookup)

    def begin_step(self) -> None:
        """What a step verifies is known when it ends."""

    def end_step(self, ended: bool) -> tuple[Strategy, Strategy]:
        verified = self.drafted_under
        if ended:
            self.drafted_under = self._started.popleft()
        return verified, self.drafted_under

    def clear(self) -> None:
        super().clear()
        self._started.clear()

    def _propose_drafts(self, input_batch: Any, *given: Any, dummy_run: bool = False, **options: Any) -> torch.Tensor:
        if dummy_run:
            return super()._propose_drafts(input_batch, *given, dummy_run=True, **options)
        if self.recorded is not None and self.recorded.records:
            count = input_batch.num_reqs
            lengths = input_batch.num_scheduled_tokens[:count].tolist()
            states, spans = self._step_states(input_batch, given, [0] * count, lengths)
            late = torch.stack([_first_positions(input_batch), given[_NUM_REJECTED][:count].long()], dim=1)
            self.recorded.add(states, spans, late)
        if self._model_head is None or not self.drafter_ready:
            return self._no_drafts[: input_batch.num_reqs]
        return self._model_head.propose(input_batch, given, options, self.strategy.num_tokens)


def build_switch(
    runner: Any,
    scheduler: Any,
    rollout: RolloutConfig,
    speculation: SpeculationConfig,
    token_drafters: Mapping[str, TokenDrafter],
) -> StrategySwitch:
    """The switch of an engine's model runner and scheduler.

    Raises:
        ConfigError: the name of a token drafter is not one of a model-free drafter, or vLLM has turned off asynchronous
            scheduling.
    """
    if rollout.async_scheduling and not runner.vllm_config.scheduler_config.async_scheduling:
        raise ConfigError("rollout.async_scheduling: found true; vLLM turns it off on this platform; allowed: false")
    kind: type[StrategySwitch] = StrategySwitch if rollout.model_runner == "v1" else SwitchV2
    most = speculation.num_speculative_tokens if speculation.enabled else 0
    draft_without_padding(scheduler, most, int(runner.max_num_reqs))
    switch = (AsynchronousSwitch if rollout.async_scheduling else kind)(
        runner,
        most,
        speculation.drafter if speculation.enabled and speculation.drafter in model_drafters() else None,
        {} if rollout.async_scheduling else token_drafters,
        speculation.skipped,
        probabilistic=speculation.draft_sample_method == "probabilistic",
    )
    if isinstance(switch, AsynchronousSwitch):
        switch.follow(scheduler)
    return switch


@contextmanager
def no_speculator() -> Iterator[None]:
    """Engines built in this context have no speculator of vLLM's."""
    from vllm.v1.worker.gpu import model_runner

    upstream = model_runner.init_speculator
    model_runner.init_speculator = _build_none
    try:
        yield
    finally:
        model_runner.init_speculator = upstream

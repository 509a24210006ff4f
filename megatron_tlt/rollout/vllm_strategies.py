"""Control over drafting in one vLLM engine: the strategy can change per step, the draft budget per request."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron_tlt.config.speculation import SkippedConfig
from megatron_tlt.errors import ConfigError
from megatron_tlt.platform.copies import copy_to_device
from megatron_tlt.rollout.recorded_states import RecordedStates
from megatron_tlt.rollout.skipped_states import Gap, SkippedCounts, SkippedStates
from megatron_tlt.rollout.token_lookups import DraftingRow, KnownTokens, TokenLookups, TrackedRequest
from megatron_tlt.rollout.types import Request
from megatron_tlt.rollout.vllm_draft_sampling import DraftedRow, DraftSampler
from megatron_tlt.rollout.vllm_head import DrafterHead, HeadInput
from megatron_tlt.speculation.strategy import OFF, Strategy
from megatron_tlt.speculation.token_drafter import TokenDrafter

_BETTER_THAN_HEAD = 0.5
"""A pair's model-free draft below this probability is discarded, so that the head drafts: trees nearly always match."""


@dataclass(frozen=True)
class _NoDrafts:
    """Replaces vLLM's ``SpecDecodeMetadata`` in a step that verifies nothing; vLLM reads only these fields of it."""

    logits_indices: torch.Tensor
    num_draft_tokens: tuple[int, ...] = ()


@dataclass
class _Row(DraftingRow):
    """``start`` is the position of its first token in the step. ``length`` counts its tokens in the step without
    rejected drafts. ``offset`` is its first row in the step's hidden states. ``last``: no later step can use drafts.
    """

    start: int
    length: int
    offset: int
    prompt: bool
    last: bool


class StrategySwitch:
    """Drafts for a live engine under the current strategy, which can change between any two steps.

    It replaces the drafter call of vLLM's model runner, which follows sampling. The head (a drafter model) runs only
    under its own strategies. For the tokens it skips, the target's hidden states are kept (``SkippedStates``); the
    head's KV cache is filled from them when it drafts for that request again. The head always processes prompts, since
    requests share their KV cache blocks. Drafts are verified, so sampling cannot change.
    """

    def __init__(
        self,
        runner: Any,
        num_tokens: int,
        head: str | None,
        token_drafters: Mapping[str, TokenDrafter],
        skipped: SkippedConfig,
        *,
        probabilistic: bool = False,
    ) -> None:
        """Take over drafting in ``runner``, which was built for at most ``num_tokens`` draft tokens (0: none).

        ``probabilistic``: the head samples its drafts from its distribution instead of taking the likeliest tokens.

        Raises:
            ConfigError: the name of a token drafter is not one of a model-free drafter.
        """
        self._runner = runner
        self._num_tokens = num_tokens
        self._head_name = head
        self._lookups = TokenLookups(token_drafters if num_tokens else {})
        self._tracked: dict[str, TrackedRequest] = {}
        self._budgets: dict[str, int] = {}
        self._unique = itertools.count()
        self._catch_up_s = self._drafting_s = 0.0
        self.strategy = OFF
        # the strategy that produced the drafts now waiting for verification
        self.drafted_under = self._verified = OFF
        # False while the head's weights are incomplete: it then skips everything, prompts included
        self.drafter_ready = True
        # also receives the head's inputs, as training data for the drafter
        self.recorded: RecordedStates | None = None
        self._head: DrafterHead | None = None
        self._sampler: DraftSampler | None = None
        self._skipped = SkippedStates(skipped, int(runner.max_num_reqs))
        if num_tokens:
            self._install(runner, probabilistic)

    def _install(self, runner: Any, probabilistic: bool) -> None:
        """Take over drafting in the runner."""
        if self._head_name:
            self._head, self._sampler = DrafterHead(runner), DraftSampler(runner, probabilistic)
        runner.propose_draft_token_ids = self._propose
        # near one sequence's maximum length vLLM drafts token 0 for the whole batch; ``_limit`` checks each request
        runner._input_fits_in_drafter = lambda metadata: metadata is not None
        self._sample_drafts = runner._sample
        runner._sample = self._sample
        self._describe_drafts = runner._calc_spec_decode_metadata
        runner._calc_spec_decode_metadata = self._describe
        self._take_drafts = runner.take_draft_token_ids
        runner.take_draft_token_ids = self._take
        self._any_drafts = False

    @property
    def drafters(self) -> tuple[str, ...]:
        """Names of the drafters that a strategy can use."""
        return (*self._lookups.names, *([self._head_name] if self._head_name else []))

    @property
    def skipped(self) -> SkippedCounts:
        """Counts of tokens that the head skipped so far, and of those computed later."""
        return dataclasses.replace(self._skipped.counts) if self._num_tokens else SkippedCounts()

    def begin_step(self) -> None:
        """Note the strategy whose drafts the next step verifies."""
        self._verified = self.drafted_under

    def end_step(self, ended: bool) -> tuple[Strategy, Strategy]:
        """Return the strategies whose drafts the step verified, and which it drafted under.

        ``ended``: whether a step has ended since the last call, or only started (asynchronous scheduling).
        """
        return self._verified, self.drafted_under

    def take_catch_up_s(self) -> float:
        """Seconds that the head spent on computing skipped tokens since the last call."""
        seconds, self._catch_up_s = self._catch_up_s, 0.0
        return seconds

    def take_drafting_s(self) -> float:
        """Seconds spent on drafting since the last call, skipped tokens included; 0 under OFF."""
        seconds, self._drafting_s = self._drafting_s, 0.0
        return seconds

    def release(self) -> None:
        """Free the memory of skipped hidden states; call it between rollouts."""
        if self._num_tokens:
            self._skipped.release()

    def set(self, strategy: Strategy, budgets: Mapping[str, int] | None) -> None:
        """Draft under ``strategy`` from now on; ``budgets`` limits the draft tokens of requests, by the caller's id.

        Raises:
            ConfigError: the engine lacks a drafter or was built for fewer tokens, or a budget is negative.
        """
        if not set(strategy.drafters) <= set(self.drafters):
            allowed = ", ".join(("off", *self.drafters))
            raise ConfigError(f"strategy {strategy.name}; this engine's drafters: {allowed}")
        if strategy.num_tokens > self._num_tokens:
            raise ConfigError(f"strategy {strategy.name}; this engine was built for up to {self._num_tokens} tokens")
        if bad := {name: budget for name, budget in (budgets or {}).items() if budget < 0}:
            raise ConfigError(f"draft budgets {bad}; allowed: 0 and more")
        self.strategy = strategy
        self._budgets = dict(budgets or {})

    def add(self, internal_id: str, request: Request) -> None:
        """Register a request that the engine has queued under vLLM's id."""
        # without a key the request is its own problem and shares no drafting history
        self._tracked[internal_id] = TrackedRequest(request, request.problem_key or f"request {next(self._unique)}")
        if self.recorded is not None:
            self.recorded.start(internal_id, request.request_id, request.prompt_token_ids)

    def finish(self, internal_id: str, response: Sequence[int]) -> None:
        """Register that the request has ended with this response."""
        self._lookups.finish(self._tracked.pop(internal_id), response)
        self._forget(internal_id)
        if self.recorded is not None:
            self.recorded.finish(internal_id, response)

    def _forget(self, internal_id: str) -> None:
        if self._num_tokens:
            self._skipped.forget(internal_id)

    def clear(self) -> None:
        """End the rollout: drop the remaining requests and all drafts that wait for verification."""
        for internal_id, tracked in self._tracked.items():
            self._lookups.give_up(tracked)
            self._forget(internal_id)
            if self.recorded is not None:
                self.recorded.forget(internal_id)
        self._tracked.clear()
        if self._sampler is not None:
            self._sampler.clear()
        self.drafted_under = OFF

    def external_id(self, internal_id: str) -> str:
        """The caller's id of a request."""
        return self._tracked[internal_id].request.request_id

    def seed_of(self, internal_id: str) -> int:
        """A request's seed."""
        return self._tracked[internal_id].request.seed

    def _describe(self, num_draft_tokens: np.ndarray[Any, Any], ends: np.ndarray[Any, Any]) -> Any:
        """Replaces vLLM's ``_calc_spec_decode_metadata``, whose small tensors cost a few percent of a plain step.

        ``ends`` (requests,): the end of each request's tokens in the step.
        """
        if num_draft_tokens.any():
            return self._describe_drafts(num_draft_tokens, ends)
        return _NoDrafts(copy_to_device([ends - 1], self._runner.device)[0])

    def _sample(self, logits: torch.Tensor, spec_decode_metadata: Any) -> Any:
        """Replaces vLLM's ``_sample``: a step without drafts uses the faster path of an engine without a drafter."""
        drafted = spec_decode_metadata is not None and any(spec_decode_metadata.num_draft_tokens)
        return self._sample_drafts(logits, spec_decode_metadata if drafted else None)

    def _take(self) -> Any:
        """Replaces vLLM's ``take_draft_token_ids``; returns None if no request has drafts."""
        return self._take_drafts() if self._any_drafts else None

    def _propose(self, scheduler_output: Any, sampled_token_ids: list[list[int]], *rest: Any) -> list[list[int]]:
        """Replaces vLLM's ``propose_draft_token_ids``; returns the drafts of each row of the batch."""
        with self._drafting():
            drafts = self._draft(scheduler_output, sampled_token_ids, *rest)
        self._any_drafts = any(drafts)
        return drafts

    @contextmanager
    def _drafting(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        if self.strategy != OFF:
            self._drafting_s += time.perf_counter() - began

    def _draft(
        self,
        scheduler_output: Any,
        sampled_token_ids: list[list[int]],
        sampling_metadata: Any,
        hidden_states: torch.Tensor,
        sample_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        spec_decode_metadata: Any,
        common_attn_metadata: Any,
        slot_mappings: Any,
    ) -> list[list[int]]:
        if self._sampler is not None:
            self._sampler.clear()
        self.drafted_under = self.strategy
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        if self.strategy == OFF and self._head is None:
            return drafts
        features, rows = None, None
        if self._head is not None:
            states = aux_hidden_states if self._runner.use_aux_hidden_state_outputs else [hidden_states]
            assert states is not None, "the target was not built to give auxiliary hidden states"
            total = scheduler_output.total_num_scheduled_tokens
            parts = [part[:total] if part.shape[0] > total else part for part in states]  # a CUDA graph pads
            records = self.recorded is not None and self.recorded.records
            if self.strategy == OFF and not records and self._skip_plain_step(parts, len(drafts)):
                return drafts
            features = torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]
            if records:
                rows = self._rows(scheduler_output, sampled_token_ids)
                self._record(rows, features, hidden_states)
                if self.strategy == OFF and self._skip_plain_step([features], len(drafts)):
                    return drafts
        if rows is None:
            rows = self._rows(scheduler_output, sampled_token_ids)
        tokens = [self._runner.input_batch.token_ids_cpu[row.index, : row.num_tokens] for row in rows]
        for name in self.strategy.drafters:
            if name in self._lookups.names:
                self._look_up(name, rows, tokens, drafts)
        if features is not None:
            self._use_head(rows, features, common_attn_metadata, sampling_metadata, drafts)
        return drafts

    def _rows(self, scheduler_output: Any, sampled_token_ids: Sequence[Sequence[int]]) -> list[_Row]:
        batch = self._runner.input_batch
        computed = batch.num_computed_tokens_cpu
        rows, offset = [], 0
        for index, internal_id in enumerate(batch.req_ids):
            scheduled = scheduler_output.num_scheduled_tokens[internal_id]
            drafted = len(scheduler_output.scheduled_spec_decode_tokens.get(internal_id, ()))
            sampled = len(sampled_token_ids[index])
            start, num_tokens = int(computed[index]), int(batch.num_tokens_no_spec[index])
            # the verifier adds one of the sampled tokens; its hidden states come with the next step
            length = scheduled - drafted + max(0, sampled - 1)
            prompt = scheduled - drafted > 1 or start < int(batch.num_prompt_tokens[index])
            room = self._room(internal_id, num_tokens)
            limit = self._limit(internal_id, num_tokens, room) if sampled else 0
            rows.append(_Row(index, internal_id, num_tokens, limit, start, length, offset, prompt, room < 1))
            offset += scheduled
        return rows

    def _record(self, rows: list[_Row], features: torch.Tensor, hidden: torch.Tensor) -> None:
        """Record the head's inputs for a step, followed by the target's hidden states after the final norm."""
        assert self.recorded is not None
        states = features
        if self._runner.use_aux_hidden_state_outputs:
            states = torch.cat([features, hidden[: len(features)]], dim=-1)
        self.recorded.add(states, [(row.internal_id, row.start, row.offset, row.length) for row in rows])

    def _room(self, internal_id: str, num_tokens: int) -> int:
        """Number of draft tokens that still fit after ``num_tokens``; the verifier adds one token itself."""
        request = self._tracked[internal_id].request
        generated = num_tokens - len(request.prompt_token_ids)
        return int(min(request.sampling.max_tokens - generated, self._runner.max_model_len - num_tokens)) - 1

    def _limit(self, internal_id: str, num_tokens: int, room: int) -> int:
        """Number of draft tokens that the request gets in this step."""
        most = self.strategy.num_tokens
        request = self._tracked[internal_id].request
        limit = min(most, self._budgets.get(request.request_id, most), room)
        missing = request.sampling.min_tokens - (num_tokens - len(request.prompt_token_ids))
        if missing > 0:
            # vLLM bans stop tokens in the verifier's token based on the count before the drafts
            limit = min(limit, missing - 1)
        return max(0, limit)

    def _look_up(
        self, name: str, rows: Sequence[DraftingRow], tokens: Sequence[KnownTokens], drafts: list[list[int]]
    ) -> None:
        """Draft with a token drafter, after it has the newest tokens of all rows: responses share problems."""
        for row, known in zip(rows, tokens, strict=True):
            # the tokens of a chunked prompt are all known at once, but its response starts after the last chunk
            self._lookups.feed(name, self._tracked[row.internal_id], known)
        least = self.strategy.least_probability
        if name != self.strategy.drafters[-1]:
            least = max(least, _BETTER_THAN_HEAD)
        for row in rows:
            if row.limit:
                drafts[row.index] = self._lookups.propose(name, self._tracked[row.internal_id], row.limit, least)

    def _use_head(
        self, rows: list[_Row], features: torch.Tensor, metadata: Any, sampling: Any, drafts: list[list[int]]
    ) -> None:
        """Run the head on prompts and on rows that draft with it; keep the hidden states of the other rows.

        Rows that already have drafts get none from the head.
        """
        assert self._head is not None and self._sampler is not None
        names = self.strategy.drafters
        asking = {row.index for row in rows if self._head_name in names and row.limit and not drafts[row.index]}
        used: list[_Row] = []
        skipped: list[_Row] = []
        for row in rows:
            wanted = self.drafter_ready and (row.prompt or row.index in asking)
            if wanted or not row.last:
                (used if wanted else skipped).append(row)
        if skipped:
            self._skip(skipped, features)
        if not used:
            return
        inputs: list[HeadInput] = []
        late: list[tuple[int, Gap]] = []
        for row in used:
            self._skipped.drop_from(row.internal_id, row.start)
            if row.index in asking:
                late += [(row.index, gap) for gap in self._skipped.take(row.internal_id)]
            inputs.append(HeadInput(row.index, row.start, features[row.offset : row.offset + row.length]))
        if late:
            began = time.perf_counter()
            self._head.fill(self._late_inputs(late), metadata, sampling)
            self._catch_up_s += time.perf_counter() - began
        limits = [row.limit if row.index in asking else 0 for row in used]
        drafted = [self._drafted(row, limit) for row, limit in zip(used, limits, strict=True)]
        self._sampler.begin(drafted, self.strategy.least_probability)
        self._head.propose(inputs, max(limits), metadata, sampling)
        for row, draft in zip(used, self._sampler.end(), strict=True):
            if row.index in asking:
                drafts[row.index] = draft

    def _late_inputs(self, gaps: Sequence[tuple[int, Gap]]) -> list[HeadInput]:
        (rows,) = copy_to_device([np.concatenate([gap.rows for _, gap in gaps])], self._skipped.states.device)
        pieces = self._skipped.states[rows].split([len(gap.rows) for _, gap in gaps])
        return [HeadInput(row, gap.position, states) for (row, gap), states in zip(gaps, pieces, strict=True)]

    def _drafted(self, row: _Row, limit: int) -> DraftedRow:
        request = self._tracked[row.internal_id].request
        return DraftedRow(row.internal_id, request.sampling.temperature, request.seed, row.num_tokens, limit)

    def _skip(self, rows: list[_Row], features: torch.Tensor) -> None:
        picked = [row.offset + token for row in rows for token in range(row.length)]
        (picked_rows,) = copy_to_device([np.array(picked)], features.device)
        self._skipped.append(features[picked_rows], ((row.internal_id, row.start, row.length) for row in rows))

    def _skip_plain_step(self, parts: list[torch.Tensor], size: int) -> bool:
        """Keep all states of a step with one decoded token per request; False if the step is not of that kind."""
        batch = self._runner.input_batch
        starts = batch.num_computed_tokens_cpu[:size]
        if parts[0].shape[0] != size or (starts < batch.num_prompt_tokens[:size]).any():
            return False
        self._skipped.append_step(parts, batch.req_ids, starts)
        return True

"""Exact counts of each engine step and request, read from vLLM's scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron_tlt.rollout.types import DraftStats


@dataclass
class StepAccount:
    """Counts of one engine step. All count tokens except ``running`` (requests in the step's batch) and
    ``num_drafts`` (requests that had drafts).

    ``had_prefill``: the step computed prompt tokens, or recomputed those of a preempted request.
    """

    running: int = 0
    num_tokens: int = 0
    num_draft_tokens: int = 0
    num_drafts: int = 0
    had_prefill: bool = False
    accepted_per_position: list[int] = field(default_factory=list)


@dataclass
class _RequestAccount:
    num_steps: int = 0
    num_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)

    def freeze(self) -> DraftStats:
        return DraftStats(
            self.num_steps,
            self.num_tokens,
            self.num_drafts,
            self.num_draft_tokens,
            self.num_accepted_tokens,
            tuple(self.accepted_per_position),
        )


class SchedulerAccounts:
    """Wraps ``scheduler.update_from_output``, which sees both drafts and verification results.

    A draft token counts as accepted if the verification accepted it, even if an earlier stop token or the length limit
    removed it from the response. ``num_tokens`` counts only tokens of the response.
    """

    def __init__(self, scheduler: Any, num_speculative_tokens: int, asynchronous: bool = False) -> None:
        """``asynchronous``: drafts are scheduled as -1, before their ids are known. Otherwise that id is padding, which
        vLLM adds to keep a batch uniform.
        """
        self._upstream = scheduler.update_from_output
        self._width = num_speculative_tokens
        self._least_id = -1 if asynchronous else 0
        self._requests: dict[str, _RequestAccount] = {}
        self._step = self._empty_step()
        scheduler.update_from_output = self._update_from_output

    def _empty_step(self) -> StepAccount:
        return StepAccount(accepted_per_position=[0] * self._width)

    def clear(self) -> None:
        """Reset all counts before a rollout."""
        self._requests.clear()
        self._step = self._empty_step()

    def take_step(self) -> StepAccount:
        """Counts of the steps since the last call."""
        step, self._step = self._step, self._empty_step()
        return step

    def take_request(self, internal_id: str) -> DraftStats:
        """Counts of a finished request, by the id that ``add_request`` returned."""
        return self._requests.pop(internal_id, _RequestAccount()).freeze()

    def _update_from_output(self, scheduler_output: Any, model_output: Any) -> Any:
        outputs = self._upstream(scheduler_output, model_output)
        running = len(scheduler_output.num_scheduled_tokens)
        self._step.running += running
        drafted = sum(map(len, scheduler_output.scheduled_spec_decode_tokens.values()))
        # a decoding request has one token in the step besides its drafts
        prompt_tokens = scheduler_output.total_num_scheduled_tokens - drafted - running
        self._step.had_prefill |= bool(prompt_tokens or scheduler_output.scheduled_new_reqs)
        emitted = {
            output.request_id: len(output.new_token_ids)
            for client_outputs in outputs.values()
            for output in client_outputs.outputs
        }
        for request_id, num_tokens in emitted.items():
            if num_tokens:
                self._count_request(request_id, num_tokens, scheduler_output, model_output)
        return outputs

    def _count_request(self, request_id: str, num_tokens: int, scheduler_output: Any, model_output: Any) -> None:
        account = self._requests.setdefault(request_id, _RequestAccount(accepted_per_position=[0] * self._width))
        account.num_steps += 1
        account.num_tokens += num_tokens
        self._step.num_tokens += num_tokens
        scheduled = scheduler_output.scheduled_spec_decode_tokens.get(request_id, ())
        drafts = sum(token >= self._least_id for token in scheduled)
        if not drafts:
            return
        # the verification step returns the accepted draft tokens and one token of its own
        accepted = len(model_output.sampled_token_ids[model_output.req_id_to_index[request_id]]) - 1
        account.num_drafts += 1
        account.num_draft_tokens += drafts
        account.num_accepted_tokens += accepted
        for position in range(accepted):
            account.accepted_per_position[position] += 1
            self._step.accepted_per_position[position] += 1
        self._step.num_drafts += 1
        self._step.num_draft_tokens += drafts

"""Conversion of requests to vLLM's form, and of vLLM's outputs to responses."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_tlt.errors import ConfigError, RunError
from megatron_tlt.rollout.types import DraftStats, Request, Response

_FINISH_REASONS = ("stop", "length", "abort")


@dataclass
class RolloutState:
    """A running rollout: unfinished requests, their ids in vLLM, and those that a callback aborted."""

    requests: dict[str, Request] = field(default_factory=dict)
    internal_of: dict[str, str] = field(default_factory=dict)
    aborted: list[str] = field(default_factory=list)


def check_requests(requests: Sequence[Request], max_prompt_tokens: int, max_model_len: int, vocab_size: int) -> None:
    """Check that all requests fit the engine.

    Raises:
        ConfigError: a request does not fit; names the first one and the reason.
    """
    seen: set[str] = set()
    for request in requests:
        name, length, sampling = request.request_id, len(request.prompt_token_ids), request.sampling
        if name in seen:
            raise ConfigError(f"request {name}: the id is used twice in one rollout")
        seen.add(name)
        if not 0 < length - request.begun <= max_prompt_tokens:
            raise ConfigError(
                f"request {name}: its prompt has {length - request.begun} tokens; allowed are 1 to "
                f"rollout.max_prompt_tokens, {max_prompt_tokens}"
            )
        if not 0 <= min(request.prompt_token_ids) <= max(request.prompt_token_ids) < vocab_size:
            raise ConfigError(
                f"request {name}: its prompt has token ids {min(request.prompt_token_ids)} to "
                f"{max(request.prompt_token_ids)}; allowed are 0 to {vocab_size - 1}"
            )
        if sampling.max_tokens < 1 or length + sampling.max_tokens > max_model_len:
            raise ConfigError(
                f"request {name}: a prompt of {length} tokens with max_tokens {sampling.max_tokens}; "
                f"allowed are 1 to {max_model_len - length}, the engine's max_model_len being {max_model_len}"
            )
        if not 0 <= request.seed < 1 << 63:
            raise ConfigError(f"request {name}: its seed is {request.seed}; allowed are 0 to 2**63 - 1")


def add_request(llm: Any, request: Request, own_generator: bool = True) -> str:
    """Queue a request; returns vLLM's own id for it.

    ``own_generator``: vLLM samples it with a random generator of its own, from its seed.

    Raises:
        ConfigError: vLLM refuses or changes its sampling, or stop strings without a tokenizer in the model folder.
    """
    from vllm import SamplingParams, exceptions
    from vllm.sampling_params import RequestOutputKind

    sampling = request.sampling
    if sampling.stop:
        _load_tokenizer(llm, request)
    try:
        params = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=max(sampling.top_k, 0),
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            stop_token_ids=list(sampling.stop_token_ids),
            stop=list(sampling.stop),
            seed=request.seed if own_generator else None,
            logprobs=sampling.logprobs,  # in addition to the sampled token
            detokenize=bool(sampling.stop),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        if params.temperature != sampling.temperature:
            # the actor scores responses at the requested temperature
            raise ConfigError(
                f"request {request.request_id}: temperature {sampling.temperature}; allowed: 0, or at least "
                f"{params.temperature}, which vLLM would take instead"
            )
        prompt = {"prompt_token_ids": list(request.prompt_token_ids)}
        return str(llm.add_request(request.request_id, prompt, params))
    except (ValueError, getattr(exceptions, "VLLMClientError", ValueError)) as error:  # 0.26 raises ValueError alone
        raise ConfigError(f"request {request.request_id}: {' '.join(str(error).split())}") from error


def _load_tokenizer(llm: Any, request: Request) -> None:
    """Load vLLM's detokenizer at the first request that needs it; prompts and responses are token ids."""
    if llm.output_processor.tokenizer is not None:
        return
    from vllm.tokenizers import cached_get_tokenizer

    folder = Path(llm.model_config.model)
    if not (folder / "tokenizer_config.json").is_file():
        raise ConfigError(
            f"request {request.request_id}: stop strings {list(request.sampling.stop)} need a tokenizer, but "
            f"{folder} has no tokenizer_config.json; allowed without: stop_token_ids"
        )
    llm.output_processor.tokenizer = cached_get_tokenizer(str(folder))


def to_response(request: Request, completion: Any, draft: DraftStats, now: float) -> Response:
    """Convert vLLM's CompletionOutput to a response.

    Raises:
        RunError: the counts differ from vLLM's number of tokens, or a fault in vLLM ended the request.
    """
    tokens = array("i", completion.token_ids)
    reason = str(completion.finish_reason)
    if reason not in _FINISH_REASONS:
        raise RunError(
            f"request {request.request_id}: vLLM ended it with {reason!r} after {len(tokens)} tokens; "
            f"allowed: {', '.join(_FINISH_REASONS)}"
        )
    if isinstance(completion.stop_reason, str) and len(tokens) <= draft.num_tokens:
        # a stop string is found after the step was counted, so the counts may include later tokens of the step
        draft = dataclasses.replace(draft, num_tokens=len(tokens))
    if draft.num_tokens != len(tokens):
        raise RunError(f"request {request.request_id}: {draft.num_tokens} tokens accounted for, {len(tokens)} returned")
    entries = completion.logprobs or []
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    if request.sampling.logprobs:
        top = tuple(_likeliest(entry, request.sampling.logprobs) for entry in entries)
    return Response(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        token_ids=tokens,
        log_probs=array("f", (entry[token].logprob for entry, token in zip(entries, tokens, strict=True))),
        finish_reason=reason,
        finished_at=now,
        draft=draft,
        top_log_probs=top,
    )


def _likeliest(entry: Any, count: int) -> tuple[tuple[int, float], ...]:
    ranked = sorted(entry.items(), key=lambda item: (-item[1].logprob, item[0]))
    return tuple((token, value.logprob) for token, value in ranked[:count])


def end_started_steps(llm: Any) -> None:
    """Wait for steps that asynchronous scheduling started ahead of the last requests' ends; they give no tokens."""
    core = llm.engine_core.engine_core
    while core.batch_queue:
        core.step_fn()


def abort_request(llm: Any, internal_id: str) -> Any:
    """End a request now; returns vLLM's CompletionOutput with the tokens generated so far."""
    from vllm.v1.engine import FinishReason

    state = llm.output_processor.request_states[internal_id]
    output = state.make_request_output([], None, FinishReason.ABORT, None)
    llm.abort_request([internal_id], internal=True)
    return output.outputs[0]

"""vLLM with its own drafter, driven like ours: what users have without this package."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_tlt.config.schema import RolloutConfig
from megatron_tlt.config.speculation import SpeculationConfig
from megatron_tlt.rollout import vllm_setup
from megatron_tlt.rollout.types import DraftStats, Request, Response
from megatron_tlt.rollout.vllm_requests import add_request, to_response


class StockEngine:
    """An engine that drafts by vLLM's ``method`` (``ngram`` or ``suffix``), always ``num_tokens``."""

    def __init__(self, folder: Path, rollout: RolloutConfig, method: str, num_tokens: int, seed: int) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        speculative: dict[str, Any] = {"method": method, "num_speculative_tokens": num_tokens}
        if method == "ngram":
            speculative |= {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
        arguments = vllm_setup.engine_args(folder, rollout, SpeculationConfig(enabled=False), seed)
        with (
            vllm_setup.launcher_variables(),
            vllm_setup.isolated_random_state(),
            vllm_setup.untouched_torch_threads(),
            vllm_setup.readable_weights(),
        ):
            self._llm = LLMEngine.from_engine_args(EngineArgs(**{**arguments, "speculative_config": speculative}))
        self._seed = seed
        self._runner = vllm_setup.model_runner_of(self._llm)
        self._histories: dict[str, Any] = {}

    def use_history(self, name: str) -> None:
        """Switches to the history of ``name``; suffix decoding then ignores all earlier responses.

        Its history covers everything that an engine ever decoded. If the same requests were decoded again in another
        case, it would know their exact responses, as in no real run.
        """
        if name not in self._histories:
            self._histories[name] = type(self._runner.drafter)(self._runner.vllm_config)
        self._runner.drafter = self._histories[name]

    def generate(self, requests: Sequence[Request]) -> list[Response]:
        """One response per request, in the requests' order; without draft statistics."""
        self._llm.reset_prefix_cache()
        by_id = {request.request_id: request for request in requests}
        found: dict[str, Response] = {}
        with vllm_setup.isolated_random_state(self._seed):
            for request in requests:
                add_request(self._llm, request)
            while self._llm.has_unfinished_requests():
                for output in self._llm.step():
                    completion = output.outputs[0]
                    counted = DraftStats(num_tokens=len(completion.token_ids))
                    found[output.request_id] = to_response(by_id[output.request_id], completion, counted, 0.0)
        return [found[request.request_id] for request in requests]

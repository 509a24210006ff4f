"""Engines of one measurement: ours with random weights, and stock vLLM with its own defaults."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tools.bench.gpu_measure.measurement import Settings
from tools.bench.gpu_measure.models import dtype_of


def start_process(model_runner: str = "v1") -> None:
    """Prepares libraries and a one-rank process group, as a launch's rank does."""
    from megatron_tlt.platform.device import initialize_distributed, prepare
    from megatron_tlt.rollout import vllm_setup

    vllm_setup.prepare_environment(model_runner)
    prepare()
    initialize_distributed(600)


def rollout_config(settings: Settings, prompt: int, response: int, **vllm: Any) -> Any:
    """A ``RolloutConfig`` with dummy weights, which a measurement fills on the device."""
    from megatron_tlt.config.schema import RolloutConfig

    options: dict[str, Any] = {"dtype": str(dtype_of(settings)).removeprefix("torch."), "load_format": "dummy"}
    options |= {"gpu_memory_utilization": 0.85} if settings.on_gpu else {"kv_cache_memory_bytes": 256 << 20}
    return RolloutConfig(max_prompt_tokens=prompt, max_response_tokens=response, vllm={**options, **vllm})


def head_section(head: Path | None, tokens: int, **changes: Any) -> Any:
    """A ``SpeculationConfig`` with an EAGLE-3 head; without one speculation is off."""
    from megatron_tlt.config.speculation import SpeculationConfig

    if head is None:
        return SpeculationConfig(enabled=False)
    return SpeculationConfig(drafter="eagle3", path=head, num_speculative_tokens=tokens, **changes)


def acceptance_options(acceptance: float, tokens: int) -> dict[str, Any]:
    """Options of vLLM's ``speculative_config``: each draft is accepted with this probability, whatever it is."""
    rates = [acceptance**position for position in range(1, tokens + 1)]
    return {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}


@contextmanager
def set_acceptance(acceptance: float | None) -> Iterator[None]:
    """Engines of ours built in this context accept drafts by ``acceptance_options``; None: by their tokens."""
    from megatron_tlt.rollout import vllm_setup

    upstream = vllm_setup.speculative_config

    def config(*given: Any) -> dict[str, Any] | None:
        found = upstream(*given)
        return found and {**found, **acceptance_options(acceptance or 0.0, found["num_speculative_tokens"])}

    if acceptance is not None:
        vllm_setup.speculative_config = config
    try:
        yield
    finally:
        vllm_setup.speculative_config = upstream


def make_requests(count: int, prompt_tokens: int, lengths: Sequence[int], vocab_size: int, temperature: float) -> Any:
    """Requests with random prompts and responses of exactly these lengths, the same on every call."""
    from megatron_tlt.rollout.types import Request, SamplingSpec

    rng = random.Random(0)
    found = []
    for index in range(count):
        prompt = tuple(rng.randrange(vocab_size) for _ in range(prompt_tokens))
        sampling = SamplingSpec(temperature=temperature, max_tokens=lengths[index], min_tokens=lengths[index])
        found.append(Request(f"request {index}", prompt, sampling, rng.randrange(1 << 40), f"problem {index}"))
    return found


class StockVllm:
    """vLLM with its defaults for speed: its own engine process, asynchronous scheduling, full graphs, no seeds.

    On a GPU it has model runner V2; on a CPU the only one that there is. It reports the sampled tokens' log-probs,
    which reinforcement learning needs.

    Args:
        folder: of the target's config; weights are random.
        settings: of the measurement.
        max_model_len: tokens of a request at most.
        max_num_seqs: concurrent requests at most.
        speculative: its ``speculative_config``.
    """

    def __init__(
        self,
        folder: Path,
        settings: Settings,
        max_model_len: int,
        max_num_seqs: int,
        speculative: dict[str, Any] | None = None,
    ) -> None:
        from megatron_tlt.platform.device import prepare

        options: dict[str, Any] = {}
        if settings.on_gpu:
            os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
            options |= {"gpu_memory_utilization": 0.85, "max_num_batched_tokens": 8192}
        else:
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
            os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
            prepare()
            options |= {"enforce_eager": True, "kv_cache_memory_bytes": 256 << 20}
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        if not settings.on_gpu:
            from megatron_tlt.rollout.vllm_patches import rank_without_compiling

            rank_without_compiling()
        arguments = EngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype=str(dtype_of(settings)).removeprefix("torch."),
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            speculative_config=speculative,
            **options,
        )
        self._llm = LLMEngine.from_engine_args(arguments)
        config = self._llm.vllm_config
        self.description = {
            "runner": "V2" if getattr(config, "use_v2_model_runner", False) else "V1",
            "async_scheduling": bool(getattr(config.scheduler_config, "async_scheduling", False)),
            "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
        }

    def generate(self, requests: Sequence[Any], on_step: Callable[[float], None] = lambda seconds: None) -> int:
        """Decodes each request to its ``max_tokens``; ``on_step`` gets each step's seconds. Returns decoded tokens."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        tokens = 0
        for request in requests:
            sampling = SamplingParams(
                temperature=request.sampling.temperature,
                max_tokens=request.sampling.max_tokens,
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            prompt = {"prompt_token_ids": list(request.prompt_token_ids)}
            self._llm.add_request(request.request_id, prompt, sampling)
        while self._llm.has_unfinished_requests():
            began = time.perf_counter()
            finished = self._llm.step()
            on_step(time.perf_counter() - began)
            tokens += sum(len(output.outputs[0].token_ids) for output in finished if output.finished)
        return tokens

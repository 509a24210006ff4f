"""Environment of a vLLM engine: variables, process group, random state, engine arguments."""

from __future__ import annotations

import json
import os
import random
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_tlt.config.checks import drafter_problems
from megatron_tlt.config.drafter_kinds import kind_of
from megatron_tlt.config.schema import GRAPH_ARGS, RolloutConfig
from megatron_tlt.config.speculation import SpeculationConfig
from megatron_tlt.errors import ConfigError, RunError
from megatron_tlt.platform.collectives import broadcast_data
from megatron_tlt.rollout.adaptive import pool_of, strategies_of
from megatron_tlt.rollout.vllm_experts import plain_cpu_experts
from megatron_tlt.rollout.vllm_graphs import (
    can_plan_graphs,
    engine_arguments,
    every_length,
    graphs_by_tokens,
    planned_graphs,
)
from megatron_tlt.rollout.vllm_head_v2 import measured_speculator
from megatron_tlt.rollout.vllm_runner_v2 import no_speculator

_GIB = 1 << 30
_CPU_BATCHED_TOKENS = 8192
_GPU_SEQUENCES, _GPU_BATCHED_TOKENS = 256, 8192

# rollout.vllm may not set these: they follow from other keys, or the rollout package relies on their value
OWNED_ENGINE_ARGS: dict[str, str] = {
    "model": "model",
    "tokenizer": "model",
    "seed": "run.seed",
    "tensor_parallel_size": "rollout.tensor_parallel_size",
    "pipeline_parallel_size": "rollout.tensor_parallel_size",
    "data_parallel_size": "launcher",
    "speculative_config": "speculation",
    "skip_tokenizer_init": "the engine (prompts are token ids)",
    "runner": "the engine (generate)",
    "distributed_executor_backend": "the engine (external_launcher)",
    "logprobs_mode": "the engine (processed_logprobs)",
    "async_scheduling": "rollout.async_scheduling",
    "generation_config": "the engine (requests say when to stop)",
}


def prepare_environment(model_runner: str = "v1") -> None:
    """Set what vLLM reads from the environment; must run before the first ``import vllm``."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine lives in this process
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # colocated: cores are shared with the actor
    # on a GPU the rank's log has vLLM's lines on memory, backends and graphs; on a CPU it warns about intended settings
    # (an eager engine) in two dozen lines per process
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO" if torch.cuda.is_available() else "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if model_runner == "v2" else "0"
    # vLLM takes 0 for "all memory", which cannot work beside an actor
    if os.environ.get("VLLM_CPU_KVCACHE_SPACE", "") in ("", "0"):
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"


def ensure_process_group() -> bool:
    """Create the one-rank group that the external launcher needs; return whether one was created.

    An existing group is not changed.

    Raises:
        RunError: several processes were launched, but the group was not initialised before the engine.
    """
    if dist.is_initialized():
        return False
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RunError("WORLD_SIZE is above 1, but torch.distributed was not initialised before the vLLM engine")
    from vllm.platforms import current_platform

    dist.init_process_group(current_platform.dist_backend, store=dist.HashStore(), rank=0, world_size=1)
    return True


@contextmanager
def launcher_variables() -> Iterator[None]:
    """Set the rank variables that vLLM's external launcher reads, as torchrun sets them, within the context.

    They are removed afterwards, so that programs started from this process do not act as ranks of a launch.
    """
    missing = {"RANK": str(dist.get_rank()), "LOCAL_RANK": "0"}
    missing = {name: value for name, value in missing.items() if name not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)


def is_cpu() -> bool:
    """Whether vLLM is its build for CPUs."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def model_runner_of(llm: Any) -> Any:
    """The model runner of an ``LLMEngine`` that runs in this process."""
    return llm.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def engine_group() -> dist.ProcessGroup | None:
    """CPU group of the ranks of the engine just built; None for an engine of one rank."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    return group.cpu_group if group.world_size > 1 else None


@contextmanager
def kept_process_groups() -> Iterator[None]:
    """Keep an engine's shutdown from destroying process groups that the actor and other engines use."""
    from vllm.v1.engine import core

    upstream = core.cleanup_dist_env_and_memory
    core.cleanup_dist_env_and_memory = lambda *_, **__: None
    try:
        yield
    finally:
        core.cleanup_dist_env_and_memory = upstream


@contextmanager
def isolated_random_state(seed: int | None = None) -> Iterator[None]:
    """Use separate global random generators within the context, seeded from ``seed`` if given; restore the caller's.

    vLLM reseeds and draws from the global generators, which must not affect the actor in the same process.
    """
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=devices):
        try:
            if seed is not None:
                random.seed(seed)
                np.random.seed(seed % (1 << 32))
                torch.manual_seed(seed)
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


@contextmanager
def untouched_torch_threads() -> Iterator[None]:
    """Undo the changes that an engine's start makes to torch's thread count and ``torch.set_num_threads``."""
    setter, threads = torch.set_num_threads, torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads = setter
        if torch.get_num_threads() != threads:
            setter(threads)


@contextmanager
def shared_memory_of_its_own() -> Iterator[None]:
    """Give the shared memory of an engine's CPU ranks a name unique to this launch; all ranks must enter together.

    Under an external launcher vLLM names it by the ranks alone. Two launches on one machine would then share it, and
    leftovers of a killed launch would prevent the next start.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or dist.get_world_size() == 1:
        yield
        return
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    token, upstream = broadcast_data(secrets.token_hex(4), str), _CPUSHMDistributed.make_group_name
    _CPUSHMDistributed.make_group_name = staticmethod(lambda communicator: f"{upstream(communicator)}-{token}")
    try:
        yield
    finally:
        _CPUSHMDistributed.make_group_name = staticmethod(upstream)


@contextmanager
def readable_weights() -> Iterator[None]:
    """Make CPU builds of vLLM keep linear and expert weights as plain tensors within the context.

    vLLM empties a packed weight after loading, so it can be neither written in place nor read back. Measured on a
    1.3 M parameter float32 model, the plain path is as fast as the packed one. Other devices do not pack.
    """
    from vllm.model_executor.layers import utils
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        yield
        return

    def keep_weight(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    upstream = utils.dispatch_cpu_unquantized_gemm
    utils.dispatch_cpu_unquantized_gemm = keep_weight
    try:
        with plain_cpu_experts():
            yield
    finally:
        utils.dispatch_cpu_unquantized_gemm = upstream


def speculative_config(speculation: SpeculationConfig, model_runner: str = "v1") -> dict[str, Any] | None:
    """Convert the section to vLLM's ``speculative_config``; None if speculation is off.

    Raises:
        ConfigError: the section contradicts itself, or the drafter's folder is invalid.
    """
    if not speculation.enabled:
        return None
    if problems := drafter_problems(speculation):
        raise ConfigError("; ".join(problems))
    if model_runner == "v2" and speculation.path is None:
        # builds what n-grams need: dense token ids, and a speculator, which ``no_speculator`` replaces
        ngram = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
        return {"method": "ngram", "num_speculative_tokens": speculation.num_speculative_tokens, **ngram}
    if speculation.path is None:
        # vLLM's hook for drafters that are not models
        proposer = "megatron_tlt.rollout.vllm_drafters.NoProposer"
        return {
            "method": "custom_class",
            "model": proposer,
            "num_speculative_tokens": speculation.num_speculative_tokens,
        }
    from vllm.config.load import LoadConfig

    head = {
        "method": kind_of(speculation.drafter).method,
        "model": str(speculation.path),
        "num_speculative_tokens": speculation.num_speculative_tokens,
        # loaded from its folder even if the policy's weights are dummies; sharded over the policy's ranks
        "draft_load_config": LoadConfig(),
    }
    if model_runner == "v2":
        _check_layers_are_read(speculation.path)
        return head | {"draft_sample_method": speculation.draft_sample_method}
    return head | {"disable_padded_drafter_batch": True}  # draft on the host, where StrategySwitch selects the drafter


def _check_layers_are_read(head: Path) -> None:
    """The second runner ignores the layers in ``eagle_config``, and would feed the head those of other layers."""
    key, found = "eagle_aux_hidden_state_layer_ids", json.loads((head / "config.json").read_text(encoding="utf-8"))
    if key in (found.get("eagle_config") or {}) and key not in found:
        raise ConfigError(
            f"{head}/config.json: {key} stands in eagle_config, which rollout.model_runner v2 does not read; allowed: "
            "beside eagle_config"
        )


def counts_random_numbers(rollout: RolloutConfig) -> bool:
    """Whether ``SeededSampler`` samples; ``auto`` keeps vLLM's generators on a CPU, and the bits of earlier runs."""
    chosen = rollout.random_numbers
    if rollout.model_runner == "v2":  # its sampler computes numbers from seed and position itself
        return False
    return chosen == "counter" or (chosen == "auto" and not is_cpu())


def _max_model_len(model_path: Path, rollout: RolloutConfig, speculation: SpeculationConfig) -> int:
    """Maximum sequence length, plus the positions that a drafter model drafts, if the model has that many.

    vLLM stops drafting for the whole batch once one sequence has no room for drafts.
    """
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    if not speculation.enabled or speculation.path is None:
        return longest
    model = json.loads((model_path / "config.json").read_text(encoding="utf-8"))
    positions = int(model.get("max_position_embeddings", longest))
    return max(longest, min(positions, longest + speculation.num_speculative_tokens))


def engine_args(model_path: Path, rollout: RolloutConfig, speculation: SpeculationConfig, seed: int) -> dict[str, Any]:
    """Keyword arguments for vLLM's EngineArgs: fixed ones, this package's defaults, then ``rollout.vllm``.

    Raises:
        ConfigError: the model folder does not exist, a key of ``rollout.vllm`` is managed here or unknown, or the size
            of the CPU's KV cache is not a number.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    if not (model_path / "config.json").is_file():
        raise ConfigError(f"model folder {model_path}: no config.json in it; a Hugging Face model folder is needed")
    for key in rollout.vllm:
        if key in OWNED_ENGINE_ARGS:
            raise ConfigError(f"rollout.vllm.{key} is managed by {OWNED_ENGINE_ARGS[key]} and cannot be overridden")
        if key not in EngineArgs.__dataclass_fields__:
            raise ConfigError(f"rollout.vllm.{key}: vLLM's EngineArgs has no such field")
    args: dict[str, Any] = {
        "model": str(model_path),
        "skip_tokenizer_init": True,
        "runner": "generate",
        "seed": seed,
        "tensor_parallel_size": rollout.tensor_parallel_size,
        "distributed_executor_backend": "external_launcher",
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "async_scheduling": rollout.async_scheduling,
        "speculative_config": _scheduled(rollout, speculation),
        "max_model_len": _max_model_len(model_path, rollout, speculation),
        "disable_log_stats": True,
    }
    if current_platform.is_cpu():
        if rollout.vllm.get("enable_chunked_prefill"):
            raise ConfigError("rollout.vllm.enable_chunked_prefill is true; on a CPU only false is allowed")
        if rollout.cuda_graphs != "auto":
            raise ConfigError(f"rollout.cuda_graphs is {rollout.cuda_graphs}; on a CPU only auto is allowed")
        args["enforce_eager"] = True
        # where vLLM splits a prompt it rewinds the request's generator, which a CPU generator cannot do
        args["enable_chunked_prefill"] = False
        args["max_num_batched_tokens"] = max(
            _CPU_BATCHED_TOKENS, rollout.vllm.get("max_model_len", args["max_model_len"])
        )
        args["kv_cache_memory_bytes"] = _cpu_cache_gib() * _GIB
    else:
        args["enable_sleep_mode"] = True
        args["moe_backend"] = "triton"  # keeps expert weights plain; dense models ignore it
        args |= _graph_args(rollout, speculation)
    return args | rollout.vllm


def _cpu_cache_gib() -> int:
    found = os.environ["VLLM_CPU_KVCACHE_SPACE"]
    if not found.isdecimal():
        raise ConfigError(f"VLLM_CPU_KVCACHE_SPACE: found {found!r}; allowed: whole GiB")
    return int(found)


def cache_hint(reason: str) -> str:
    """Suffix for vLLM's error about the KV cache, because on a CPU vLLM's own advice has no effect here."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or "KV cache" not in reason:
        return ""
    size = f"VLLM_CPU_KVCACHE_SPACE, {_cpu_cache_gib()} GiB"
    return f" (here the cache's size is {size}, or rollout.vllm.num_gpu_blocks_override)"


def _scheduled(rollout: RolloutConfig, speculation: SpeculationConfig) -> dict[str, Any] | None:
    """``speculative_config``; for the second runner with every draft length of the strategies.

    That schedule gives each length its graphs, also at a user's own capture sizes, and lets the scheduler reserve other
    numbers of drafts than the most, which it also pads requests to without one.
    """
    found = speculative_config(speculation, rollout.model_runner)
    if found is None or rollout.model_runner == "v1":
        return found
    limits = _limits(rollout)
    lengths = every_length(pool_of(speculation, **limits), limits["max_num_seqs"])
    return found | {"num_speculative_tokens_per_batch_size": lengths}


def _graph_args(rollout: RolloutConfig, speculation: SpeculationConfig) -> dict[str, Any]:
    """CUDA graph arguments, unless ``rollout.vllm`` sets its own; vLLM's are right for ``auto`` without speculation."""
    chosen = {} if rollout.cuda_graphs == "auto" else {"cudagraph_mode": rollout.cuda_graphs.upper()}
    if GRAPH_ARGS & set(rollout.vllm):
        return {}
    if not speculation.enabled:
        return {"compilation_config": chosen} if chosen else {}
    limits = _limits(rollout)
    found = engine_arguments(pool_of(speculation, **limits), **limits, runner=rollout.model_runner)
    return limits | {"compilation_config": found["compilation_config"] | chosen}


def _limits(rollout: RolloutConfig) -> dict[str, int]:
    """A GPU engine's maximum numbers of sequences and of tokens in a step."""
    defaults = {"max_num_seqs": _GPU_SEQUENCES, "max_num_batched_tokens": _GPU_BATCHED_TOKENS}
    return {name: int(rollout.vllm.get(name, default)) for name, default in defaults.items()}


@contextmanager
def build_context(rollout: RolloutConfig, speculation: SpeculationConfig) -> Iterator[None]:
    """The context in which to build an engine, so that it has our speculator, and the graphs of its arguments."""
    own_graphs, v2 = bool(GRAPH_ARGS & set(rollout.vllm)), rollout.model_runner == "v2"
    with ExitStack() as stack:
        if not (v2 or own_graphs):
            stack.enter_context(graphs_by_tokens(required=rollout.cuda_graphs == "full"))
        if v2 and (not speculation.enabled or speculation.path is None):
            stack.enter_context(no_speculator())
        elif v2 and any(strategy.least_percent for strategy in strategies_of(speculation)):
            stack.enter_context(measured_speculator())
        if v2 and speculation.enabled and not (own_graphs or is_cpu()) and can_plan_graphs():
            stack.enter_context(planned_graphs(pool_of(speculation, **_limits(rollout))))
        yield

"""Settings of engines that share a process, as a benchmark's arms do."""

from __future__ import annotations

from megatron_tlt.config.schema import RolloutConfig
from megatron_tlt.platform.device import current_device

_CACHE_BYTES = 4 << 30


def one_of_several(rollout: RolloutConfig) -> RolloutConfig:
    """``rollout`` for each of several engines in a process.

    On a GPU without sleep mode, which vLLM gives one engine of a process, and with a bounded KV cache: the first engine
    would take all memory.
    """
    if not current_device().is_cuda:
        return rollout
    shared = {"enable_sleep_mode": False, "kv_cache_memory_bytes": _CACHE_BYTES}
    return rollout.model_copy(update={"vllm": shared | rollout.vllm})

"""Imports what every rank with vLLM imports for its engine; a process that has done so can be forked.

What only some models or releases have is left to the ranks.
"""

import contextlib
import importlib

from megatron_tlt.config.schema import visible_gpus
from megatron_tlt.rollout.vllm_setup import prepare_environment

_MODULES = (
    "vllm.v1.engine.llm_engine",
    "vllm.v1.core.sched.scheduler",
    "vllm.model_executor.model_loader",
    "vllm.model_executor.warmup.kernel_warmup",
    "vllm.model_executor.layers.quantization.online.base",
)
_CPU_MODULES = ("vllm.v1.worker.cpu_worker", "vllm.v1.attention.backends.cpu_attn")

prepare_environment()
for _name in (*_MODULES, *(() if visible_gpus() else _CPU_MODULES)):
    with contextlib.suppress(ModuleNotFoundError):  # another release has it elsewhere
        importlib.import_module(_name)

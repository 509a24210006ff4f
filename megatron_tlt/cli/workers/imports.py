"""Imports what every rank of a training run imports; a process that has done so can be forked into ranks.

It does on purpose what a rank does when its engine and policy are built, in that order; what only some models or
releases have is left to the ranks.
"""

import contextlib
import importlib

from megatron_tlt.rollout.vllm_setup import prepare_environment

MODULES = (
    "megatron_tlt.actor",  # prepares the platform, before anything of Megatron
    "megatron_tlt.trainer.loop",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.core.sched.scheduler",
    "vllm.model_executor.model_loader",
    "vllm.model_executor.warmup.kernel_warmup",
    "vllm.model_executor.layers.quantization.online.base",
)
_CPU_MODULES = ("vllm.v1.worker.cpu_worker", "vllm.v1.attention.backends.cpu_attn")


def import_all() -> None:
    """Imports the modules; a release that lacks one has it elsewhere."""
    from megatron_tlt.config.schema import visible_gpus

    prepare_environment()
    for name in (*MODULES, *(() if visible_gpus() else _CPU_MODULES)):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)


import_all()

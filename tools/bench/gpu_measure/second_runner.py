"""Rehearses vLLM's second model runner, with asynchronous scheduling, on a CPU: Triton's kernels are interpreted."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from tools.bench.gpu_measure.measurement import Settings


def interpret() -> str | None:
    """Prepares this process, before anything imports torch; returns why that is not possible, or None."""
    from tests.helpers.triton_interpreter import TRITON, interpret_triton

    if not (TRITON / "triton").is_dir():
        return "the second model runner needs a GPU, or triton's interpreter (bash tests/run.sh --all --setup-only)"
    interpret_triton(str(TRITON))
    return None


def scheduling(settings: Settings, second: bool) -> AbstractContextManager[None]:
    """The context in which to build an engine: on a CPU vLLM would turn asynchronous scheduling off."""
    if settings.on_gpu or not second:
        return nullcontext()
    from tests.helpers.triton_interpreter import asynchronous_on_a_cpu, replace_device_functions

    replace_device_functions()
    return asynchronous_on_a_cpu()

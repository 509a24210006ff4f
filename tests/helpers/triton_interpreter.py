"""Lets vLLM's second model runner run on a CPU: its Triton kernels are interpreted."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.helpers.launch import REPOSITORY

TRITON = Path(os.environ.get("TLT_TRITON", REPOSITORY / ".venv" / "triton"))
"""A folder with the package triton, which tests/run.sh --all installs. In .venv itself other tests would see it."""


class _Interpreter:
    """vLLM's CPU build runs Triton's kernels only beside a backend of this name; interpreted, they need none."""

    class driver:
        @staticmethod
        def is_active() -> bool:
            return False


def interpret_triton(folder: str) -> None:
    """Import triton from ``folder`` with its interpreter; call it before anything imports torch."""
    os.environ["TRITON_INTERPRET"] = "1"
    sys.path.insert(0, folder)
    from triton.backends import backends  # type: ignore[import-not-found]
    from triton.runtime.interpreter import InterpreterBuilder  # type: ignore[import-not-found]

    backends["cpu"] = _Interpreter
    # the conjunction of a block's mask and one number's has a type that the interpreter's own stores refuse
    store = InterpreterBuilder.create_masked_store

    def store_where(builder: Any, pointers: Any, values: Any, mask: Any, cache_policy: Any) -> Any:
        mask.data = mask.data.astype(bool)
        return store(builder, pointers, values, mask, cache_policy)

    InterpreterBuilder.create_masked_store = store_where
    _patch_the_language_once_a_kernel()


def _patch_the_language_once_a_kernel() -> None:
    """The interpreter replaces functions of the language again in each function that a kernel calls."""
    from triton import language
    from triton.runtime import interpreter

    patch, modules = interpreter._patch_lang, (language, language.core)
    replaced: set[str] = set()

    def patch_once(function: Any) -> Any:
        seen = {value.__name__ for value in function.__globals__.values() if any(value is m for m in modules)}
        if seen <= replaced:
            return interpreter._LangPatchScope()
        scope = patch(function)
        if not replaced:
            restore = scope.restore

            def restore_all() -> None:
                replaced.clear()
                restore()

            scope.restore = restore_all
        replaced.update(seen)
        return scope

    interpreter._patch_lang = patch_once


def replace_device_functions() -> None:
    """Give the rejection sampler a ``log1p`` of the language's own: the interpreter has no device libraries."""
    from triton import language  # type: ignore[import-not-found]
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils

    rejection_sampler_utils.tldevice = SimpleNamespace(log1p=lambda x: language.log(1.0 + x))


@contextmanager
def asynchronous_on_a_cpu() -> Iterator[None]:
    """Engines built in this context may schedule asynchronously, which vLLM's CPU platform turns off."""
    from vllm.platforms.cpu import CpuPlatform

    upstream = CpuPlatform.check_and_update_config

    def update(config: Any) -> None:
        upstream(config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = staticmethod(update)
    try:
        yield
    finally:
        CpuPlatform.check_and_update_config = upstream

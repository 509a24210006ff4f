"""Runs the unmodified Megatron-Core on CPU tensors, without changing torch for other modules.

Megatron-Core writes ``device="cuda"`` and ``torch.cuda.*`` throughout. An import hook gives every module under
``megatron`` and ``mbridge`` its own ``__import__``, which returns a proxy of ``torch``: factories and ``torch.device``
map cuda to cpu, streams and events do nothing, RNG states are the CPU generator's. Every other module in the process,
including vLLM, sees the real torch.

Two tensor methods, ``Tensor.type()`` and ``Tensor.cuda()``, are patched: they answer as on CUDA to callers inside
those packages only.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import importlib.abc
import importlib.machinery
import logging
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

PACKAGES = ("megatron", "mbridge")

_FACTORIES = [
    "arange",
    "as_tensor",
    "empty",
    "empty_like",
    "empty_strided",
    "eye",
    "full",
    "full_like",
    "linspace",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randn",
    "randn_like",
    "randperm",
    "tensor",
    "tril_indices",
    "triu_indices",
    "zeros",
    "zeros_like",
]


def _in_scope(module_name: str) -> bool:
    return module_name.split(".", 1)[0] in PACKAGES


def _to_cpu(device: Any) -> Any:
    """Maps any name of a CUDA device to the CPU; other devices are unchanged."""
    if isinstance(device, int) and not isinstance(device, bool):
        return torch.device("cpu")
    if isinstance(device, str) and device.startswith("cuda"):
        return torch.device("cpu")
    if isinstance(device, torch.device) and device.type == "cuda":
        return torch.device("cpu")
    return device


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _to_cpu(kwargs["device"])
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return call


class _DeviceType(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> torch.device:
        return _to_cpu(torch.device(*args, **kwargs))

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.device)


class _Device(metaclass=_DeviceType):
    """Replaces ``torch.device``: builds CPU devices and recognises real ones."""


class _Stream:
    """A CUDA stream or event on a device that runs everything in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in {"wait_stream", "wait_event", "wait", "record", "synchronize"}:
            return lambda *args, **kwargs: None
        if name == "record_event":
            return lambda *args, **kwargs: _Stream()
        if name == "query":
            return lambda: True
        raise AttributeError(name)

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        return None


class _ModuleProxy(types.ModuleType):
    """A module with the listed names replaced; other names are the real module's."""

    def __init__(self, real: types.ModuleType, replaced: dict[str, Any]) -> None:
        super().__init__(real.__name__)
        self.__dict__["_real"] = real
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_real"], name)


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _set_rng_state(state: torch.Tensor, device: Any = None, **kwargs: Any) -> None:
    torch.set_rng_state(state)


def _get_rng_state(device: Any = None, **kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _build_proxies() -> dict[str, types.ModuleType]:
    """The replaced modules by full name."""
    random = _ModuleProxy(torch.cuda.random, {"get_rng_state": _get_rng_state, "set_rng_state": _set_rng_state})
    nvtx = _ModuleProxy(torch.cuda.nvtx, {"range_push": _nothing, "range_pop": _nothing})
    cuda = _ModuleProxy(
        torch.cuda,
        {
            "current_device": lambda: torch.device("cpu"),
            "device_count": lambda: 1,
            "is_available": lambda: False,
            "set_device": _nothing,
            "synchronize": _nothing,
            "empty_cache": _nothing,
            "memory_allocated": lambda *a, **k: 0,
            "max_memory_allocated": lambda *a, **k: 0,
            "memory_reserved": lambda *a, **k: 0,
            "max_memory_reserved": lambda *a, **k: 0,
            "reset_peak_memory_stats": _nothing,
            "Stream": _Stream,
            "Event": _Stream,
            "current_stream": lambda *a, **k: _Stream(),
            "default_stream": lambda *a, **k: _Stream(),
            "stream": lambda *a, **k: contextlib.nullcontext(),
            "device": lambda *a, **k: contextlib.nullcontext(),
            "get_rng_state": _get_rng_state,
            "set_rng_state": _set_rng_state,
            "manual_seed": torch.manual_seed,
            "random": random,
            "nvtx": nvtx,
            "_lazy_call": lambda callback, **k: callback(),
            "_lazy_init": _nothing,
            "FloatTensor": torch.FloatTensor,
            "HalfTensor": torch.HalfTensor,
            "BFloat16Tensor": torch.BFloat16Tensor,
        },
    )
    replaced: dict[str, Any] = {name: _on_cpu(getattr(torch, name)) for name in _FACTORIES}
    replaced.update(device=_Device, cuda=cuda)
    proxy = _ModuleProxy(torch, replaced)
    return {"torch": proxy, "torch.cuda": cuda, "torch.cuda.random": random, "torch.cuda.nvtx": nvtx}


def _scoped_builtins() -> dict[str, Any]:
    """Builtins whose ``import torch`` returns the proxy."""
    proxies = _build_proxies()

    def scoped_import(
        name: str,
        globals_: Any = None,
        locals_: Any = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> types.ModuleType:
        module = builtins.__import__(name, globals_, locals_, fromlist or (), level)
        return proxies.get(module.__name__, module) if level == 0 else module

    return {**vars(builtins), "__import__": scoped_import}


def _cure(name: str, module: Any) -> None:
    """Patches a module right after it is executed, where the proxy alone is not enough."""
    if name == "megatron.core.jit":
        # TorchScript and torch.compile bypass the proxy and use torch itself.
        module.disable_jit_fuser()
    elif name == "megatron.core.tensor_parallel.random":
        module._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
        module._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
        # Megatron warns if the CPU generator moves inside a tracked region; here it is the tracked generator.
        logging.getLogger(name).setLevel(logging.ERROR)
    elif name == "megatron.core.transformer.module":
        module._FLOAT_TYPES = (torch.FloatTensor,)
        module._HALF_TYPES = (torch.HalfTensor,)
        module._BF16_TYPES = (torch.BFloat16Tensor,)
    elif name == "megatron.core.transformer.moe.moe_utils":
        if not hasattr(module, "te_general_gemm"):
            module.te_general_gemm = None
        # On CPU the original returns the tensor unchanged, but collectives need plain numbers.
        module.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (
            tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor
        )
    elif name == "megatron.core.tensor_parallel.mappings":
        _cure_uneven_parts(module)


def _cure_uneven_parts(module: Any) -> None:
    """gloo gathers and scatters equal parts only; expert tokens come in parts of any size."""
    gather, scatter = module._gather_along_first_dim, module._reduce_scatter_along_first_dim

    def gather_parts(input_: torch.Tensor, group: Any, sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if sizes is None or group.size() == 1:
            return gather(input_, group, None, use_global_buffer)
        padded = input_.new_zeros((max(sizes), *input_.shape[1:]))
        padded[: len(input_)] = input_
        parts = [torch.empty_like(padded) for _ in sizes]
        torch.distributed.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def scatter_parts(input_: torch.Tensor, group: Any, sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if sizes is None or group.size() == 1:
            return scatter(input_, group, None, use_global_buffer)
        summed = input_.clone()
        torch.distributed.all_reduce(summed, group=group)
        start = sum(sizes[: group.rank()])
        return summed[start : start + sizes[group.rank()]]

    module._gather_along_first_dim, module._reduce_scatter_along_first_dim = gather_parts, scatter_parts


class _ScopedLoader(importlib.abc.Loader):
    """Executes a module with the scoped builtins, then patches it."""

    def __init__(self, loader: Any, scoped: dict[str, Any]) -> None:
        self._loader = loader
        self._scoped = scoped

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__["__builtins__"] = self._scoped
        self._loader.exec_module(module)
        _cure(module.__name__, module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class _ScopedFinder(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        self._scoped = _scoped_builtins()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not _in_scope(fullname):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _ScopedLoader(spec.loader, self._scoped)
        return spec


def _patch_tensor_questions() -> None:
    real_type = torch.Tensor.type
    real_cuda = torch.Tensor.cuda

    def asked_in_scope() -> bool:
        return _in_scope(sys._getframe(2).f_globals.get("__name__", ""))

    @functools.wraps(real_type)
    def tensor_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = real_type(self, *args, **kwargs)
        if not args and not kwargs and asked_in_scope():
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    @functools.wraps(real_cuda)
    def tensor_cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self if asked_in_scope() else real_cuda(self, *args, **kwargs)

    torch.Tensor.type = tensor_type  # type: ignore[method-assign,assignment]
    torch.Tensor.cuda = tensor_cuda  # type: ignore[method-assign,assignment]


def installed() -> bool:
    """Whether the hook is installed."""
    return any(isinstance(finder, _ScopedFinder) for finder in sys.meta_path)


def install() -> None:
    """Installs the hook once; call it before ``megatron`` or ``mbridge`` is imported.

    Raises:
        RuntimeError: ``megatron`` was imported earlier, so its modules already hold the real torch.
    """
    if installed():
        return
    early = sorted(name for name in sys.modules if _in_scope(name))
    if early:
        raise RuntimeError(f"{early[0]} was imported before the CPU adapter: import it through platform.prepare()")
    _patch_tensor_questions()
    sys.meta_path.insert(0, _ScopedFinder())

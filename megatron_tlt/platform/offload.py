"""Releases device memory for a phase and restores it later, without moving a tensor.

Views keep pointing to the same storages, so buckets, shards and the parameters that are views into them stay
connected. Replacing each tensor's data by a copy would disconnect them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from megatron_tlt.errors import RunError

_LEAST_PINNED = 64 << 10
"""Bytes below which pinning costs more than it saves; small tensors share pages with others."""


class StorageOffload:
    """Frees the storages of tensors, and keeps their contents in host memory if needed.

    Host memory is kept for the next time: pinning it again costs as much as a copy.
    """

    def __init__(self) -> None:
        self._held: list[tuple[torch.UntypedStorage, int, torch.UntypedStorage | None]] = []
        self._unused: dict[int, list[torch.UntypedStorage]] = {}
        self._pinned: list[torch.UntypedStorage] = []
        weakref.finalize(self, _unpin, self._pinned).atexit = False

    def offload(self, tensors: Iterable[torch.Tensor], *, keep: bool = True) -> int:
        """Frees the memory of ``tensors``, some of which may share a storage; returns the bytes freed on the device.

        None of them may be used until :meth:`reload`. Without ``keep`` their contents are undefined after it.

        Raises:
            RunError: the host does not pin so much memory.
        """
        freed = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            size = storage.nbytes()
            if size == 0:  # empty, or already freed through another tensor
                continue
            self._held.append((storage, size, self._host_copy(storage) if keep else None))
            storage.resize_(0)
            freed += size
        return freed

    def _host_copy(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        size, unused = storage.nbytes(), self._unused.get(storage.nbytes())
        if unused:
            return unused.pop().copy_(storage)
        host = torch.empty(size, dtype=torch.uint8).untyped_storage()
        if storage.device.type == "cuda" and size >= _LEAST_PINNED:
            _pin(host)
            self._pinned.append(host)
        return host.copy_(storage)

    def reload(self) -> None:
        """Restores all freed storages; does nothing if none was freed."""
        on_gpu = bool(self._held) and self._held[0][0].device.type == "cuda"
        for storage, size, host in self._held:
            storage.resize_(size)
            if host is not None:
                storage.copy_(host, non_blocking=True)
        if on_gpu:
            torch.cuda.synchronize()
        for _, size, host in self._held:
            if host is not None:
                self._unused.setdefault(size, []).append(host)
        self._held.clear()


def _pin(memory: torch.UntypedStorage) -> None:
    """Pinned, host memory is transferred at the full speed of the bus.

    torch's own pinned allocations have sizes of powers of two, up to twice the memory.
    """
    status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes(), 0))
    if status:
        raise RunError(f"CUDA does not pin {memory.nbytes()} bytes of host memory (status {status}); see `ulimit -l`")


def _unpin(pinned: list[torch.UntypedStorage]) -> None:
    for memory in pinned:
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())

"""Releases device memory for a phase and restores it later, without moving a tensor.

Views keep pointing to the same storages, so buckets, shards and the parameters that are views into them stay
connected. Replacing each tensor's data by a copy would disconnect them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


class StorageOffload:
    """Frees the storages of tensors, and keeps their contents in host memory if needed."""

    def __init__(self) -> None:
        self._held: list[tuple[torch.UntypedStorage, int, torch.UntypedStorage | None]] = []

    def offload(self, tensors: Iterable[torch.Tensor], *, keep: bool = True) -> int:
        """Frees the memory of ``tensors``, some of which may share a storage.

        Args:
            tensors: none of them may be used until :meth:`reload`.
            keep: False discards the contents; they are undefined after the reload.

        Returns:
            Bytes freed on the device.
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

    @staticmethod
    def _host_copy(storage: torch.UntypedStorage) -> torch.UntypedStorage:
        # Pinned memory transfers at the full speed of the bus.
        host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
        return host.untyped_storage().copy_(storage)

    def reload(self) -> None:
        """Restores all freed storages; does nothing if none was freed."""
        for storage, size, host in self._held:
            storage.resize_(size)
            if host is not None:
                storage.copy_(host, non_blocking=True)
        if self._held and self._held[0][0].device.type == "cuda":
            torch.cuda.synchronize()
        self._held.clear()

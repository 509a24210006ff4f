"""Device memory that can be given up for a phase and filled again, without moving a tensor.

Views keep pointing into the same storages, so buckets, shards and the parameters cut out of them stay what they were;
replacing each tensor's data by a copy would tear them apart.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


class StorageOffload:
    """Frees the storages behind tensors, keeping what is in them in host memory where that matters."""

    def __init__(self) -> None:
        self._held: list[tuple[torch.UntypedStorage, int, torch.UntypedStorage | None]] = []

    def offload(self, tensors: Iterable[torch.Tensor], *, keep: bool = True) -> int:
        """Frees the memory of ``tensors``; several may share one storage.

        Args:
            tensors: none of them may be used until :meth:`reload`.
            keep: False forgets what is in them; they come back with undefined contents.

        Returns:
            Bytes freed on the device.
        """
        freed = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            size = storage.nbytes()
            if size == 0:  # empty, or freed already through another tensor
                continue
            self._held.append((storage, size, self._host_copy(storage) if keep else None))
            storage.resize_(0)
            freed += size
        return freed

    @staticmethod
    def _host_copy(storage: torch.UntypedStorage) -> torch.UntypedStorage:
        # Pinned memory takes and gives at the full speed of the bus.
        host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
        return host.untyped_storage().copy_(storage)

    def reload(self) -> None:
        """Fills everything again; harmless where nothing was freed."""
        for storage, size, host in self._held:
            storage.resize_(size)
            if host is not None:
                storage.copy_(host, non_blocking=True)
        if self._held and self._held[0][0].device.type == "cuda":
            torch.cuda.synchronize()
        self._held.clear()

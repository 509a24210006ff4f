"""Host memory that tensors are copied into, the same memory at every copy."""

from __future__ import annotations

from collections.abc import Mapping

import torch

_ALIGNMENT = 64
_Layout = tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]


class StagingBuffer:
    """One piece of host memory with a place for each of some named tensors.

    It is allocated anew only for tensors that do not fit: memory that was written before takes a copy several times
    faster than fresh pages do. Where tensors come from a GPU it is pinned, so that copies run beside the host.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._layout: _Layout = ()
        self._places: dict[str, torch.Tensor] = {}
        self._copied: list[torch.cuda.Event] = []

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The copies, views of one memory; valid between :meth:`wait` and the next :meth:`copy_from`."""
        return self._places

    @property
    def nbytes(self) -> int:
        """Of the tensors."""
        return sum(place.nbytes for place in self._places.values())

    @torch.no_grad()
    def copy_from(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copies all of ``tensors``, which may be overwritten as soon as this returns.

        On a GPU the copies are queued on the current stream: what is queued behind them sees to the same order, and
        the host has not waited.

        Raises:
            RuntimeError: there is not enough memory (torch's own error).
        """
        self._arrange(tensors)
        for name, tensor in tensors.items():
            self._places[name].copy_(tensor, non_blocking=True)
        self._copied = []
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            self._copied.append(event)

    def wait(self) -> None:
        """Until the copies are there; for the thread that reads them."""
        for event in self._copied:
            event.synchronize()

    def _arrange(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Makes a place for each tensor, in new memory only where the old is too small or of the wrong kind."""
        layout = tuple((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items())
        pinned = any(tensor.is_cuda for tensor in tensors.values())
        wrong_kind = pinned and not self._memory.is_pinned()
        if layout == self._layout and not wrong_kind:
            return
        starts, end = [], 0
        for tensor in tensors.values():
            starts.append(end)
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._layout, self._places = (), {}
        if wrong_kind or end > self._memory.nbytes:
            self._memory = torch.empty(0, dtype=torch.uint8)  # gone before its successor comes
            self._memory = torch.empty(end, dtype=torch.uint8, pin_memory=pinned)
        self._places = {
            name: self._memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for start, (name, tensor) in zip(starts, tensors.items(), strict=True)
        }
        self._layout = layout

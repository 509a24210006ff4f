"""Reusable host memory into which tensors are copied."""

from __future__ import annotations

from collections.abc import Mapping

import torch

_ALIGNMENT = 64
_Layout = tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]


class StagingBuffer:
    """One block of host memory with a place for each of several named tensors.

    It is reallocated only if the tensors do not fit: a copy into memory that was written before is several times faster
    than into new pages. For tensors on a GPU the memory is pinned, so that copies do not block the host.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._layout: _Layout = ()
        self._places: dict[str, torch.Tensor] = {}
        self._copied: list[torch.cuda.Event] = []

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Views of the copies; valid between :meth:`wait` and the next :meth:`copy_from`."""
        return self._places

    @property
    def nbytes(self) -> int:
        """Size of the tensors in bytes."""
        return sum(place.nbytes for place in self._places.values())

    @torch.no_grad()
    def copy_from(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy all of ``tensors``, which may be overwritten after the return.

        On a GPU the copies are queued on the current stream without blocking the host. Work queued later on this stream
        runs after them.

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
        """Wait until the copies are complete; for the thread that reads them."""
        for event in self._copied:
            event.synchronize()

    def _arrange(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Assign a place to each tensor; allocate only if the memory is too small or of the wrong kind."""
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
            self._memory = torch.empty(0, dtype=torch.uint8)  # free the old memory before allocating the new
            self._memory = torch.empty(end, dtype=torch.uint8, pin_memory=pinned)
        self._places = {
            name: self._memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for start, (name, tensor) in zip(starts, tensors.items(), strict=True)
        }
        self._layout = layout

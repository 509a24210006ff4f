"""Copies of device tensors to the host beside the computation."""

from __future__ import annotations

import torch

from megatron_tlt.platform.device import current_device


class HostCopies:
    """Copies to pinned memory on a stream of its own on a GPU; elsewhere plain copies.

    The host must not read a copy before :meth:`wait`.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream() if current_device().is_cuda else None

    def copy(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A copy on the host in ``dtype``; the tensor may be changed and freed afterwards."""
        # copied on the device first, as the source may be overwritten before the transfer
        source = tensor.detach().to(dtype, copy=True)
        if self._stream is None:
            return source
        host = torch.empty(source.shape, dtype=dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            host.copy_(source, non_blocking=True)
        source.record_stream(self._stream)  # its memory is not given away before the transfer
        return host

    def wait(self) -> None:
        """Returns once all copies have arrived."""
        if self._stream is not None:
            self._stream.synchronize()

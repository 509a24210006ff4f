"""Times a rank's own passes over its micro-batches, without the reduction of gradients, which waits for others."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from megatron.core.transformer import TransformerConfig

from megatron_tlt.platform.device import current_device


class PassClock:
    """Sums seconds and tokens of passes, while ``enabled``; otherwise it costs nothing.

    The clock of a training pass stops where Megatron begins to reduce the gradients. What remains are the passes and
    the collectives of the ranks that hold one replica together, so these have nearly the same time. A GPU is
    synchronized at both ends.
    """

    def __init__(self) -> None:
        self.enabled = False
        self._sums = {True: [0.0, 0], False: [0.0, 0]}

    def add_tokens(self, tokens: int, *, training: bool) -> None:
        """Counts the tokens of a micro-batch, padding included."""
        if self.enabled:
            self._sums[training][1] += tokens

    @contextlib.contextmanager
    def running(self, config: TransformerConfig, *, training: bool) -> Iterator[None]:
        """Times the passes inside, forward and backward with ``training``."""
        if not self.enabled:
            yield
            return
        current_device().synchronize()
        began, ends = time.perf_counter(), list[float]()
        finish = config.finalize_model_grads_func

        def finish_later(*arguments: Any, **more: Any) -> None:
            current_device().synchronize()
            ends.append(time.perf_counter())
            assert finish is not None
            finish(*arguments, **more)

        if finish is not None:
            config.finalize_model_grads_func = finish_later
        try:
            yield
        finally:
            config.finalize_model_grads_func = finish
        if not ends:
            current_device().synchronize()
            ends.append(time.perf_counter())
        self._sums[training][0] += ends[0] - began

    def take(self, *, training: bool) -> float | None:
        """Seconds per token since the last call; None without a pass."""
        seconds, tokens = self._sums[training]
        self._sums[training] = [0.0, 0]
        return seconds / tokens if tokens else None

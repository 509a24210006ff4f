"""Measures the rise of a process's memory."""

from __future__ import annotations

import ctypes
import re
import threading
from pathlib import Path


def anonymous_bytes() -> int:
    """This process's resident memory except pages of mapped files, which the kernel can reclaim."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    return int(found[1]) * 1024 if found else 0


class PeakSampler:
    """Peak anonymous memory of this process since entry, sampled every 2 ms."""

    def __enter__(self) -> PeakSampler:
        # freed memory kept by the allocator would hide a rise
        ctypes.CDLL(None).malloc_trim(0)
        self.start = self.peak = anonymous_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def _run(self) -> None:
        while not self._stop.wait(0.002):
            self.peak = max(self.peak, anonymous_bytes())

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

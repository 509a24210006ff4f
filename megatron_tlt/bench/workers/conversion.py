"""One rank of a conversion: converts, and writes how far its memory rose meanwhile."""

from __future__ import annotations

import json
import re
import signal
import sys
import threading
import time
from pathlib import Path

from megatron_tlt.actor.megatron_convert import convert
from megatron_tlt.platform.device import initialize_distributed, rank
from megatron_tlt.platform.files import atomic_write_text
from megatron_tlt.platform.processes import die_with_parent


def anonymous_bytes() -> int:
    """This process's resident memory but for pages of mapped files, which the kernel takes back at will."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    return int(found[1]) * 1024 if found else 0


class PeakSampler:
    """The most anonymous memory of this process since it was entered, looked at every 2 ms."""

    def __enter__(self) -> PeakSampler:
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


def main(source: str, target: str, out: str) -> None:
    die_with_parent(signal.SIGKILL)
    initialize_distributed(600)
    began = time.perf_counter()
    with PeakSampler() as memory:
        convert(Path(source), Path(target))
    row = {"rise": memory.peak - memory.start, "seconds": time.perf_counter() - began}
    atomic_write_text(Path(out, f"rank{rank()}.json"), json.dumps(row))


if __name__ == "__main__":
    main(*sys.argv[1:])

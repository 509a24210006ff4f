"""One rank of a conversion: converts, and writes its rise in memory."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path

from megatron_tlt.actor.megatron_convert import convert
from megatron_tlt.bench.workers.memory import PeakSampler
from megatron_tlt.platform.device import initialize_distributed, rank
from megatron_tlt.platform.files import atomic_write_text
from megatron_tlt.platform.processes import die_with_parent


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

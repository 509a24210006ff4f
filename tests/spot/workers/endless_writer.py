"""Saves one version after another until killed, each as soon as the last is durable."""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_tlt.platform.processes import stay_with_parent
from megatron_tlt.spot.checkpointer import SelectiveCheckpointer
from tests.spot.workers.killed_writers import payload_at

if __name__ == "__main__":
    stay_with_parent()
    checkpointer = SelectiveCheckpointer(Path(sys.argv[1]), keep=1)
    for number in range(10**6):
        checkpointer.save(number, payload_at(number))
        checkpointer.wait()

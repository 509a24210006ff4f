"""Starts ``megatron_tlt.bench.workers.strict`` as a script, so that a fork with its imports runs it."""

from __future__ import annotations

import sys

from megatron_tlt.bench.workers.strict import main

if __name__ == "__main__":
    main(*sys.argv[1:])

#!/usr/bin/env python3
"""Converts a checkpoint; the same as ``tlt convert``, for torchrun and srun.

python tools/convert_checkpoint.py SOURCE TARGET [--processes N]
torchrun --nproc-per-node 8 tools/convert_checkpoint.py SOURCE TARGET
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_tlt.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))

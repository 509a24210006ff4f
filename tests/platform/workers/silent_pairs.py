"""A rank of the messages between all pairs whose links do not answer."""

from __future__ import annotations

import sys
import threading

import torch.distributed as dist

from megatron_tlt.platform import pairs

if __name__ == "__main__":
    dist.barrier = threading.Event().wait
    pairs.main(sys.argv[1], float(sys.argv[2]))

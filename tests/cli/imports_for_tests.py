"""What ranks of ``worker_for_tests`` import; it says which process has."""

import os
from pathlib import Path

import torch.distributed  # noqa: F401

with Path(os.environ["TLT_TEST_IMPORTS"]).open("a", encoding="utf-8") as file:
    file.write(f"{os.getpid()}\n")

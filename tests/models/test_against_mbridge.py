"""The map of weights agrees with mbridge: dense families, and experts by Transformer Engine's names."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.launch import run_python


@pytest.mark.distributed
def test_shards_are_those_of_mbridge() -> None:
    # the adapter has to be there before mbridge is imported: a process without imports
    log = run_python(Path(__file__).parent / "workers" / "against_mbridge.py", fresh=True)
    same = {line.split()[1] for line in log.splitlines() if line.startswith("same:")}
    assert same == {"qwen2-untied", "llama", "qwen3-tied", "mixtral", "qwen3-moe"}

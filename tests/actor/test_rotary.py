"""Rotary embeddings of packed rows: Megatron-Core's bits, without its synchronizations."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.launch import run_torchrun

WORKER = Path(__file__).parent / "workers" / "rotary.py"


@pytest.mark.distributed
def test_packed_rows_have_the_bits_of_the_library_without_a_synchronization() -> None:
    assert "bits equal" in run_torchrun(WORKER, 1, timeout_s=120)

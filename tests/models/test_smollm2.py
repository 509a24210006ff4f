"""A real pretrained model: nothing that drafts changes what it says, and all who compute its log-probs agree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.launch import run_torchrun

WORKER = Path(__file__).parent / "workers" / "smollm2.py"


@pytest.mark.slow
def test_greedy_responses_and_log_probs_in_float32(smollm2: Path, tmp_path: Path) -> None:
    run_torchrun(WORKER, 1, [str(smollm2), str(tmp_path)], timeout_s=900)
    found = json.loads((tmp_path / "out.json").read_text())
    plain = found["greedy"].pop("off")
    assert len(plain) == 50 and len({tuple(response) for response in plain}) > 25
    assert len(found["greedy"]) == 5 and min(found["drafted"]) > 100
    for strategy, responses in found["greedy"].items():
        assert responses == plain, strategy

    def furthest(a: str, b: str) -> float:
        pairs = zip(found["log_probs"][a], found["log_probs"][b], strict=True)
        return max(abs(x - y) for left, right in pairs for x, y in zip(left, right, strict=True))

    assert furthest("engine", "actor") <= 1e-4
    # its residual stream reaches 24,192: transformers' own rounding is 2e-5 and more
    assert furthest("actor", "exact") <= max(1e-5, 2.0 * furthest("transformers", "exact")) <= 1e-4

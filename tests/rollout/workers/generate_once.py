"""Generate test_engine's mixed requests in a fresh process; writes [tokens, log_probs, reason] rows as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from megatron_tlt.rollout.vllm_engine import VllmEngine
from tests.rollout.conftest import ROLLOUT, SPECULATION
from tests.rollout.test_engine import mixed_requests, outcome


def main(model_folder: str, out: str) -> None:
    engine = VllmEngine(Path(model_folder), ROLLOUT, SPECULATION, seed=7)
    Path(out).write_text(json.dumps(outcome(engine.generate(mixed_requests()))))
    # Drafting must not raise it: ranks that share cores would wait for each other.
    assert torch.get_num_threads() == 1, torch.get_num_threads()
    engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])

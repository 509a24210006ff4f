"""What the planner says an engine's rank needs is what a live engine's rank holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_tlt.bench.tiny_models import write_tiny_model
from megatron_tlt.models.hf_folder import read_hf_config
from megatron_tlt.models.weight_map import WeightMap
from megatron_tlt.reshard.engine_layout import engine_side
from tests.helpers.launch import run_torchrun

pytestmark = pytest.mark.distributed
WORKER = Path(__file__).parent / "workers" / "needed.py"
# One key-value head for two ranks, or one for each. Rows on the second of two ranks: all of its own, some, and none, as
# vLLM pads 30 rows to 64. Experts that two do not divide.
MODELS: dict[str, dict[str, Any]] = {
    "qwen2-untied": {"num_key_value_heads": 1, "vocab_size": 70},
    "qwen2-tied": {"num_key_value_heads": 2, "vocab_size": 64},
    "qwen3-tied": {"num_key_value_heads": 1, "vocab_size": 150},
    "llama": {"num_key_value_heads": 2, "vocab_size": 30},
    "mistral": {"num_key_value_heads": 1, "vocab_size": 70},
    "qwen3-moe": {"num_key_value_heads": 1, "num_experts": 5},
    "mixtral": {"num_key_value_heads": 2},
}


@pytest.mark.parametrize("size", [1, 2])
def test_an_engines_spans_are_those_of_live_ranks(size: int, tmp_path: Path) -> None:
    folders = tmp_path / "models"
    for name, options in MODELS.items():
        write_tiny_model(name, folders / name, num_attention_heads=2, head_dim=32, **options)
    run_torchrun(WORKER, size, [str(folders), str(tmp_path)], timeout_s=400)
    for rank in range(size):
        live = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert set(live) == {f"{name} tp" for name in MODELS} | ({"qwen3-moe ep"} if size > 1 else set())
        for case, tensors in live.items():
            name, kind = case.split()
            weights = WeightMap(read_hf_config(folders / name))
            spans = engine_side(weights, size, size, kind == "ep").spans[rank]
            planned = {(span.tensor, span.start, span.length) for span in spans}
            found = set()
            for tensor, shape, part in tensors:
                dim = weights.cut_dims[tensor]
                assert part is None or part[0] == dim, tensor
                found.add((tensor, *(part[1:] if part else (0, shape[dim]))))
            assert {span for span in found if span[2]} == planned, f"{case}: rank {rank}"

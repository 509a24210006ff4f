"""What the planner says an engine's rank needs is what a live engine's rank holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_tlt.models.hf_folder import read_hf_config
from megatron_tlt.models.tiny import write_tiny_model
from megatron_tlt.models.weight_map import WeightMap
from megatron_tlt.reshard.engine_layout import engine_side
from tests.helpers.launch import run_torchrun

pytestmark = pytest.mark.distributed
WORKER = Path(__file__).parent / "workers" / "needed.py"
# One of each family, and a tied and an untied one.
DENSE = ("qwen2-untied", "qwen2-tied", "qwen3-tied", "llama", "mistral")
# Rows on the second of two ranks: all of its own, some of them, and none, as vLLM pads 30 rows to 64.
VOCABULARIES = (70, 64, 150, 30)


@pytest.mark.parametrize("size", [1, 2])
def test_an_engines_spans_are_those_of_live_ranks(size: int, tmp_path: Path) -> None:
    folders = tmp_path / "models"
    for index, name in enumerate(DENSE):
        # One key-value head for two ranks, or one for each.
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1 + index % 2, "head_dim": 32}
        write_tiny_model(name, folders / name, vocab_size=VOCABULARIES[index % 4], **heads)
    run_torchrun(WORKER, size, [str(folders), str(tmp_path)], timeout_s=400)
    for rank in range(size):
        live = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert set(live) == set(DENSE)
        for name in DENSE:
            weights = WeightMap(read_hf_config(folders / name))
            planned = {
                (span.tensor, span.start, span.length) for span in engine_side(weights, size, size, False).spans[rank]
            }
            found = set()
            for tensor, shape, part in live[name]:
                dim = weights.cut_dims[tensor]
                assert part is None or part[0] == dim, tensor
                found.add((tensor, *(part[1:] if part else (0, shape[dim]))))
            assert {span for span in found if span[2]} == planned, f"{name}: rank {rank}"

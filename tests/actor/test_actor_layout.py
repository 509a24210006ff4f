"""What the planner says a rank holds is what a live Megatron rank holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_tlt.bench.tiny_models import write_tiny_model
from megatron_tlt.config.layouts import Layout
from megatron_tlt.models.hf_folder import read_hf_config
from megatron_tlt.models.weight_map import WeightMap
from megatron_tlt.reshard.actor_layout import actor_side
from tests.helpers.launch import run_torchrun

pytestmark = pytest.mark.distributed
WORKER = Path(__file__).parent / "workers" / "held.py"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight layers and a vocabulary that four do not divide; six and seven layers, where others count as layers."""
    root = tmp_path_factory.mktemp("models")
    write_tiny_model("qwen2-tied", root / "tied", num_hidden_layers=8, vocab_size=66)
    write_tiny_model("qwen2-untied", root / "untied", num_hidden_layers=8, vocab_size=66)
    write_tiny_model("qwen2-tied", root / "six", num_hidden_layers=6)
    write_tiny_model("qwen2-untied", root / "seven", num_hidden_layers=7)
    write_tiny_model("qwen3-moe", root / "moe")
    write_tiny_model("mixtral", root / "mixtral")
    return root


@pytest.mark.parametrize("world", [2, 4, 8])
def test_a_layouts_spans_are_those_of_live_ranks(world: int, models: Path, tmp_path: Path) -> None:
    from tests.actor.workers.held import CASES

    run_torchrun(WORKER, world, [str(models), str(tmp_path)], timeout_s=300)
    live = [json.loads((tmp_path / f"world{world}.rank{rank}.json").read_text()) for rank in range(world)]
    for case, (model, megatron) in enumerate(CASES[world]):
        side = actor_side(WeightMap(read_hf_config(models / model)), Layout.read(megatron, world))
        for rank, spans in enumerate(side.spans):
            planned = sorted([span.tensor, span.start, span.length] for span in spans)
            assert planned == live[rank][case], f"{model} {megatron}: rank {rank}"

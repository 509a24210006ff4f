"""Two real ranks under torchrun: independent engines, and one engine over both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from megatron_tlt.rollout.types import SamplingSpec
from tests.helpers.launch import run_torchrun
from tests.helpers.tiny_models import build_qwen2, greedy, load_qwen2

from .test_engine import mixed_requests

if TYPE_CHECKING:
    from transformers import Qwen2ForCausalLM

WORKER = Path(__file__).parent / "workers" / "two_ranks.py"
VOCAB = 48  # not a multiple of vLLM's padding: the second rank's vocabulary shard is padded
pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    parent = tmp_path_factory.mktemp("pair")
    shape: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 128, "num_heads": 4, "num_kv_heads": 2, "scale": 0.12}
    return [build_qwen2(parent / str(seed), seed=seed, **shape) for seed in (1, 2)]


@pytest.fixture(scope="module")
def references(folders: list[Path]) -> list[Qwen2ForCausalLM]:
    return [load_qwen2(folder) for folder in folders]


def run(folders: list[Path], out: Path, tp: int) -> list[dict[str, Any]]:
    run_torchrun(WORKER, 2, [str(folders[0]), str(folders[1]), str(out), str(tp)], timeout_s=300)
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)]


def greedy_rows(rows: list[Any], first: int) -> list[tuple[int, list[int]]]:
    """(index of the request, its tokens) of the greedy requests among ``rows``, which start at request ``first``."""
    requests = mixed_requests()
    return [
        (first + i, row[0])
        for i, row in enumerate(rows)
        if requests[first + i].sampling == SamplingSpec(0.0, max_tokens=32)
    ]


def check_greedy(rows: list[Any], reference: Qwen2ForCausalLM, first: int = 0) -> int:
    requests = mixed_requests()
    found = greedy_rows(rows, first)
    for index, tokens in found:
        assert len(tokens) == 32
        assert tokens == greedy(reference, requests[index].prompt_token_ids, tokens)
    return len(found)


def test_independent_engines(folders: list[Path], references: list[Qwen2ForCausalLM], tmp_path: Path) -> None:
    first, second = run(folders, tmp_path, tp=1)
    assert (len(first["before"]), len(second["before"])) == (2, 22)
    assert check_greedy(second["before"], references[0], first=2) == 6
    assert check_greedy(second["after"], references[1], first=2) == 6
    assert first["sum"] == second["sum"] == 2.0
    assert set(first["shards"].values()) == {None}
    assert first["shards"].keys() == references[0].state_dict().keys() - {"lm_head.weight"}  # tied


@pytest.mark.representative("engine layout")
def test_one_engine_over_two_ranks(folders: list[Path], references: list[Qwen2ForCausalLM], tmp_path: Path) -> None:
    first, second = run(folders, tmp_path, tp=2)
    assert first["before"] == second["before"]
    assert first["after"] == second["after"]
    assert check_greedy(first["before"], references[0]) == 6
    assert check_greedy(first["after"], references[1]) == 6
    layer = "model.layers.0."
    assert second["shards"][f"{layer}self_attn.q_proj.weight"] == [0, 64, 64]
    assert second["shards"][f"{layer}self_attn.k_proj.bias"] == [0, 32, 32]
    assert second["shards"][f"{layer}self_attn.o_proj.weight"] == [1, 64, 64]
    assert second["shards"][f"{layer}mlp.up_proj.weight"] == [0, 64, 64]
    assert second["shards"][f"{layer}input_layernorm.weight"] is None
    embedding = [rank["shards"]["model.embed_tokens.weight"] for rank in (first, second)]
    assert embedding[0][2] + embedding[1][2] == VOCAB and embedding[1][1] == embedding[0][2]

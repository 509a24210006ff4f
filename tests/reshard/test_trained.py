"""A trained actor's weights in real engines: the same bits as exported ones, and transformers' greedy responses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.launch import run_torchrun
from tests.helpers.tiny_models import write_lively_model

WORKER = Path(__file__).parent / "workers" / "trained.py"
TP, PP, EP, ETP = (
    f"{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "expert_model", "expert_tensor")
)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    # a vocabulary that both sides pad, one head of keys for two ranks of an engine
    "tied": ("qwen3-tied", {"vocab_size": 90, "num_key_value_heads": 2}),
    "untied": ("qwen2-untied", {"vocab_size": 90, "num_key_value_heads": 1}),
    "moe": ("qwen3-moe", {"vocab_size": 64, "num_key_value_heads": 2}),
    "mixtral": ("mixtral", {"vocab_size": 64, "num_key_value_heads": 2}),
}
# Mixtures first: vLLM makes no groups for experts in a process whose first engine had none.
CASES: dict[str, dict[str, Any]] = {
    "EP2 to TP1 x 2": {"model": "moe", "megatron": {EP: 2}, "engine_tp": 1},
    "TP2 with experts cut to TP2": {"model": "moe", "megatron": {TP: 2, "sequence_parallel": True}, "engine_tp": 2},
    "TP2 EP2 to TP2 with spread experts": {
        "model": "mixtral",
        "megatron": {TP: 2, EP: 2, ETP: 1, "sequence_parallel": True},
        "engine_tp": 2,
        "vllm": {"enable_expert_parallel": True},
    },
    "adapters, EP2 to TP1 x 2": {
        "model": "moe",
        "megatron": {EP: 2},
        "engine_tp": 1,
        "lora": {"rank": 4, "targets": ["q_proj", "experts"]},
        "lr": 3e-2,
    },
    "adapters, TP2 to TP1 x 2": {
        "model": "tied",
        "megatron": {TP: 2, "sequence_parallel": True},
        "engine_tp": 1,
        "lora": {"rank": 4},
        "lr": 3e-2,
    },
    "adapters, PP2 to TP2": {"model": "untied", "megatron": {PP: 2}, "engine_tp": 2, "lora": {"rank": 4}, "lr": 3e-2},
    "TP2 to TP1 x 2": {"model": "tied", "megatron": {TP: 2}, "engine_tp": 1},
    "PP2 to TP1 x 2": {"model": "tied", "megatron": {PP: 2}, "engine_tp": 1},
    "PP2 to TP2": {"model": "untied", "megatron": {PP: 2}, "engine_tp": 2},
    "DP2 to TP2": {"model": "untied", "megatron": {}, "engine_tp": 2},
}


@pytest.mark.distributed
# Two runs, because a process cannot change vLLM's groups.
@pytest.mark.parametrize("engine_tp", [1, pytest.param(2, marks=pytest.mark.representative("reshard"))])
def test_engines_hold_and_say_what_the_trained_actor_would(tmp_path: Path, engine_tp: int) -> None:
    cases = {name: case for name, case in CASES.items() if case["engine_tp"] == engine_tp}
    for name, (model, options) in MODELS.items():
        write_lively_model(model, tmp_path / "models" / name, **options)
    run_torchrun(WORKER, 2, [str(tmp_path / "models"), json.dumps(cases), str(tmp_path)], timeout_s=400)
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0].keys() == cases.keys()
    for name in cases:
        sent, bound = sum(rank[name]["sent"] for rank in ranks), ranks[0][name]["bound"]
        most = 2.0 if "adapters" in name else 1.3  # tiny tensors: checksums and alignment count
        assert bound <= sent <= most * bound, name
        assert all(rank[name]["staging"] <= 2**18 for rank in ranks), name

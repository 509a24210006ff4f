"""The engines take the weights of every family that the actor trains, in each layout of two ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron_tlt.bench.tiny_models import TINY_MODELS
from megatron_tlt.rollout.types import ShardSlice
from tests.helpers.launch import run_python, run_torchrun
from tests.helpers.tiny_models import greedy, write_lively_model

from .workers.layouts import PROMPTS, SCALE

WORKERS = Path(__file__).parent / "workers"
# a head of keys for two ranks, a vocabulary that vLLM pads, experts that do not divide
TWO_RANKS: dict[str, dict[str, Any]] = {
    "qwen2-untied": {"num_key_value_heads": 1},
    "qwen3-tied": {"num_key_value_heads": 2},
    "qwen3-moe": {"num_key_value_heads": 1, "num_experts": 5},
    "mixtral": {"num_key_value_heads": 2},
}


@pytest.mark.distributed
def test_engines_hold_and_run_the_weights_of_every_family(tmp_path: Path) -> None:
    for name in TINY_MODELS:
        write_lively_model(name, tmp_path / name, num_key_value_heads=2)
    log = run_python(WORKERS / "families.py", [str(tmp_path)], timeout_s=300)
    assert {line.split()[1] for line in log.splitlines() if line.startswith("same:")} == set(TINY_MODELS)


@pytest.mark.distributed
def test_one_engine_over_two_ranks_holds_and_runs_every_kind_of_weight(tmp_path: Path) -> None:
    """Also with experts spread over the ranks: weights bit for bit, slices that cover them, transformers' tokens."""
    models, out = tmp_path / "models", tmp_path / "out"
    out.mkdir()
    for name, options in TWO_RANKS.items():
        write_lively_model(name, models / name, vocab_size=90, **options)
    run_torchrun(WORKERS / "layouts.py", 2, [str(models), str(out)], timeout_s=400)
    ranks = [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0].keys() == {f"{name} tp" for name in TWO_RANKS} | {"qwen3-moe ep", "mixtral ep"}
    for key in ranks[0]:
        name, layout = key.split()
        check_slices(models / name, [rank[key]["slices"] for rank in ranks], spread_experts=layout == "ep")
        assert ranks[0][key]["before"] == ranks[1][key]["before"]
        assert ranks[0][key]["after"] == ranks[1][key]["after"]
        check_tokens(models / name, ranks[0][key]["before"], 1.0)
        check_tokens(models / name, ranks[0][key]["after"], SCALE)


def check_slices(folder: Path, slices: list[dict[str, list[int] | None]], spread_experts: bool) -> None:
    for name, tensor in load_file(folder / "model.safetensors").items():
        held = [rank[name] for rank in slices if name in rank]
        covered = torch.zeros(tensor.shape)
        for part in held:
            (covered if part is None else ShardSlice(*part).of(covered)).add_(1)
        whole_experts = ".experts." in name and spread_experts
        assert len(held) == (1 if whole_experts else 2), name
        assert (None in held) == (whole_experts or "norm" in name or ".gate." in name), name
        assert bool((covered >= 1).all()), name


def check_tokens(folder: Path, responses: list[list[int]], scale: float) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    for prompt, tokens in zip(PROMPTS, responses, strict=True):
        assert tokens == greedy(model, prompt, tokens)
    assert max(len(set(tokens)) for tokens in responses) > 4  # no fixed point that hides a difference

"""A recipe that starts from a pretrained model: trained by the real actor, with the base's own tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from megatron_tlt.config.loader import load_config
from megatron_tlt.data.supervised import encode_examples
from megatron_tlt.data.tokenizer import load_tokenizer
from megatron_tlt.data.tokenizer_training import train_tokenizer
from megatron_tlt.models.recipe import recipe_folder
from megatron_tlt.tasks.mixture import build_sources
from tests.helpers.launch import python, run_logged
from tests.helpers.tiny_models import build_qwen2

STEPS = 25


@torch.no_grad()
def loss_of(folder: Path, config_file: Path) -> float:
    """Nats per token of worked solutions that the warm-up has not seen."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), load_tokenizer(folder)
    problems = build_sources(load_config(config_file).tasks, "held_out", 0).problems(0, 32)
    total, count = 0.0, 0
    for example in encode_examples(tokenizer, problems, 256):
        log_probs = model(torch.tensor([example.token_ids])).logits[0].log_softmax(-1)
        for at in range(example.loss_mask.index(1), len(example)):
            total -= float(log_probs[at - 1, example.token_ids[at]])
            count += 1
    return total / count


@pytest.mark.distributed
def test_a_base_is_trained_and_keeps_its_tokenizer(tmp_path: Path) -> None:
    base = build_qwen2(tmp_path / "base", vocab_size=104, scale=0.1)
    train_tokenizer([f"gcd {n} {n + 3}\n3 {n}\n#### 1234567890" for n in range(1000)], 104, base)
    file = tmp_path / "run.yaml"
    supervised = {"num_steps": STEPS, "problems_per_step": 16, "max_sequence_tokens": 256, "optimizer": {"lr": 3e-3}}
    values = {
        "run": {"name": "sft", "dir": str(tmp_path / "run"), "seed": 1},
        "model": {"recipe": {"base": str(base), "cache_dir": str(tmp_path / "models"), "supervised": supervised}},
        "tasks": [{"name": "gcd"}],
        "actor": {"transformer_impl": "local"},
        "rollout": {"max_prompt_tokens": 32, "max_response_tokens": 128},
    }
    file.write_text(yaml.safe_dump(values))
    log = run_logged([python(), "-m", "megatron_tlt.cli.workers.supervised", str(file)], timeout_s=300)
    built = recipe_folder(load_config(file))
    assert (built / "recipe.json").is_file(), log
    assert (built / "tokenizer.model").read_bytes() == (base / "tokenizer.model").read_bytes()
    assert base.is_dir() and not (base / "recipe.json").exists()
    assert loss_of(built, file) < 0.6 * loss_of(base, file)

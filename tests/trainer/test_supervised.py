"""A recipe that starts from a pretrained model: trained by the real actor, with the base's own tokenizer."""

from __future__ import annotations

import json
import random
import string
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from megatron_tlt.config.loader import load_config
from megatron_tlt.config.task import TaskConfig
from megatron_tlt.data.conversations import Conversation, encode_conversation
from megatron_tlt.data.supervised import Example, encode_example
from megatron_tlt.data.tokenizer import load_tokenizer
from megatron_tlt.data.tokenizer_training import train_tokenizer
from megatron_tlt.models.recipe import recipe_folder
from megatron_tlt.tasks.mixture import build_sources
from tests.helpers.chat import chat_folder
from tests.helpers.launch import python, run_logged
from tests.helpers.tiny_models import build_qwen2

STEPS = 25


@torch.no_grad()
def loss_of(folder: Path, examples: list[Example]) -> float:
    """Nats per trained token."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    total, count = 0.0, 0
    for example in examples:
        log_probs = model(torch.tensor([example.token_ids])).logits[0].log_softmax(-1)
        for at, trained in enumerate(example.loss_mask):
            if trained:
                total -= float(log_probs[at - 1, example.token_ids[at]])
                count += 1
    return total / count


@pytest.mark.distributed
def test_a_base_is_trained_and_keeps_its_tokenizer(tmp_path: Path) -> None:
    base = build_qwen2(tmp_path / "base", vocab_size=104, scale=0.1)
    train_tokenizer([f"gcd {n} {n + 3}\n3 {n}\n#### 1234567890" for n in range(1000)], 104, base)
    built = warm_up(tmp_path, base, {"optimizer": {"lr": 3e-3}})
    assert (built / "tokenizer.model").read_bytes() == (base / "tokenizer.model").read_bytes()
    assert base.is_dir() and not (base / "recipe.json").exists()
    problems = build_sources([TaskConfig(name="gcd")], "held_out", 0).problems(0, 32)
    examples = [encode_example(load_tokenizer(base), problem) for problem in problems]
    assert loss_of(built, examples) < 0.6 * loss_of(base, examples)


def chat(user: str) -> list[dict[str, str]]:
    """The assistant says each letter twice, whoever asks."""
    return [{"role": "user", "content": user}, {"role": "assistant", "content": "".join(c + c for c in user)}]


@pytest.mark.distributed
def test_the_answers_of_conversations_are_learned_and_nothing_else(tmp_path: Path) -> None:
    base = chat_folder(tmp_path / "base")
    build_qwen2(base, vocab_size=104, scale=0.1)
    words = random.Random(1).choices(string.ascii_lowercase, k=4 * 400)
    talks = [
        [*chat("".join(words[4 * i : 4 * i + 2])), *chat("".join(words[4 * i + 2 : 4 * i + 4]))] for i in range(400)
    ]
    data = tmp_path / "talks.jsonl"
    data.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks[:350]))
    built = warm_up(tmp_path, base, {"data": [str(data)], "num_steps": 60, "optimizer": {"lr": 5e-3}})
    assert (built / "chat_template.jinja").read_text() == (base / "chat_template.jinja").read_text()
    tokenizer = load_tokenizer(base)
    held_out = [encode_conversation(tokenizer, Conversation("here", tuple(talk))) for talk in talks[350:]]
    assert loss_of(built, held_out) < 0.6 * loss_of(base, held_out)
    others = [
        replace(example, loss_mask=tuple(1 - m if i else 0 for i, m in enumerate(example.loss_mask)))
        for example in held_out
    ]
    assert loss_of(built, others) > 0.9 * loss_of(base, others), "what the user says is as surprising as before"


def warm_up(tmp_path: Path, base: Path, supervised: dict[str, Any]) -> Path:
    """The folder of the model that the recipe builds."""
    file = tmp_path / "run.yaml"
    settings = {"num_steps": STEPS, "problems_per_step": 16, "max_sequence_tokens": 256, **supervised}
    values = {
        "run": {"name": "sft", "dir": str(tmp_path / "run"), "seed": 1},
        "model": {"recipe": {"base": str(base), "cache_dir": str(tmp_path / "models"), "supervised": settings}},
        "tasks": [{"name": "gcd"}],
        "actor": {"transformer_impl": "local"},
        "rollout": {"max_prompt_tokens": 32, "max_response_tokens": 128},
    }
    file.write_text(yaml.safe_dump(values))
    log = run_logged([python(), "-m", "megatron_tlt.cli.workers.supervised", str(file)], timeout_s=300)
    built = recipe_folder(load_config(file))
    assert (built / "recipe.json").is_file(), log
    return built

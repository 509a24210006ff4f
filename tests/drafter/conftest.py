"""Tiny targets of several families, and entries with hidden states computed by transformers."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from megatron_tlt.bench.tiny_models import write_tiny_model
from megatron_tlt.drafter.entry import Entry
from megatron_tlt.drafter.model import DraftModel, Kind

AUX_LAYERS = (1, 2, 3)
VOCAB = 64


def write_target(name: str, folder: Path) -> Path:
    """Four layers, heads of 32 or more (vLLM's CPU attention needs that)."""
    return write_tiny_model(name, folder, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1)


def load_target(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def hidden_states(model: PreTrainedModel, token_ids: torch.Tensor, kind: Kind) -> torch.Tensor:
    """States of one sequence (T): (T, H) after the final norm, preceded by EAGLE-3's auxiliary layers (T, 3 H)."""
    states = model(token_ids[None].long(), output_hidden_states=True).hidden_states
    return torch.cat([states[layer][0] for layer in (*(AUX_LAYERS if kind == "eagle3" else ()), -1)], dim=-1)


def random_entry(
    model: PreTrainedModel, kind: Kind, length: int, prompt_length: int, seed: int, step: int = 0
) -> Entry:
    """A random sequence with the target's real hidden states, in float32."""
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.randint(0, VOCAB, (length,), generator=generator, dtype=torch.int32)
    hidden = hidden_states(model, token_ids, kind)
    return Entry(f"{step}/{seed}", step, token_ids, prompt_length, hidden, float(seed % 3) / 2)


def scattered(model: DraftModel) -> DraftModel:
    """Randomize weights so that every part of the model matters: norms away from 1, fc and MLP not an identity."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(5)
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target("qwen2-untied", tmp_path_factory.mktemp("target") / "qwen2")


@pytest.fixture(scope="session")
def target(target_folder: Path) -> PreTrainedModel:
    return load_target(target_folder)


@pytest.fixture(scope="session")
def sharp_folder(target: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target with logits scaled by four, so that its next tokens can be learned."""
    sharp = copy.deepcopy(target)
    with torch.no_grad():
        sharp.lm_head.weight *= 4  # type: ignore[union-attr,operator]
    folder = tmp_path_factory.mktemp("sharp")
    sharp.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def responses(sharp_folder: Path) -> torch.Tensor:
    """The target's greedy responses to random prompts of 6 tokens, (320, 46)."""
    prompts = torch.randint(0, VOCAB, (320, 6), generator=torch.Generator().manual_seed(1))
    return load_target(sharp_folder).generate(prompts, max_new_tokens=40, do_sample=False)  # type: ignore[operator]

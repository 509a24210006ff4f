"""Tiny random model folders in float32, and exact answers computed from them with transformers."""

from __future__ import annotations

import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from megatron_tlt.bench.tiny_models import write_tiny_model


def build_qwen2(
    folder: Path,
    *,
    vocab_size: int = 64,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 2,
    num_kv_heads: int = 1,
    intermediate_size: int = 128,
    max_positions: int = 256,
    tie: bool = True,
    seed: int = 0,
    scale: float = 0.3,
) -> Path:
    """Write a random Qwen2 of head_dim ``hidden_size / num_heads`` (at least 32: vLLM's CPU attention needs that).

    ``scale`` is the standard deviation of the weights: larger makes the distributions more peaked.
    """
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        intermediate_size=intermediate_size,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tie,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config).to(torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" not in name:
                    parameter.normal_(0.0, scale)
                else:
                    parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return folder


def write_lively_model(name: str, folder: Path, **options: Any) -> Path:
    """A tiny model with larger weights: its greedy responses differ from token to token."""
    write_tiny_model(name, folder, hidden_size=128, num_attention_heads=4, head_dim=32, **options)
    state = load_file(folder / "model.safetensors")
    lively = {key: tensor if "norm" in key else tensor * 3 for key, tensor in state.items()}
    save_file(lively, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_letters_tokenizer(folder: Path, vocab_size: int) -> None:
    """A tokenizer in which each token is a letter, joined without spaces: token 0 is "a", token 26 "A"."""
    tokens = {letter: index for index, letter in enumerate(string.ascii_letters[:vocab_size])}
    tokenizer = Tokenizer(WordLevel(tokens, unk_token="a"))
    tokenizer.decoder = Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def load_qwen2(folder: Path) -> Qwen2ForCausalLM:
    """The folder's model in float32, for reference answers."""
    return Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
def logits_of(model: Qwen2ForCausalLM, token_ids: list[int] | tuple[int, ...]) -> torch.Tensor:
    """Next-token logits at each position: (length, vocabulary)."""
    return model(torch.tensor([list(token_ids)])).logits[0]


def greedy(model: Qwen2ForCausalLM, prompt: list[int] | tuple[int, ...], response: Sequence[int]) -> list[int]:
    """The model's greedy choice at each position of ``response``, given everything before it.

    Equal to ``response`` exactly if ``response`` is the greedy continuation of ``prompt``.
    """
    logits = logits_of(model, [*prompt, *response])[len(prompt) - 1 : -1]
    return logits.argmax(dim=-1).tolist()


@torch.no_grad()
def response_log_probs(
    model: PreTrainedModel, token_ids: Sequence[int], prompt_length: int, temperature: float
) -> list[float]:
    """transformers' log-probability of each token behind the prompt."""
    log_p = torch.log_softmax(model(torch.tensor([list(token_ids)])).logits[0] / temperature, dim=-1)
    return [float(log_p[t - 1, token_ids[t]]) for t in range(prompt_length, len(log_p))]


def processed_log_probs(
    logits: torch.Tensor, temperature: float = 1.0, top_p: float = 1.0, top_k: int = -1
) -> torch.Tensor:
    """Log-probabilities after temperature, top-k and top-p, from their definitions: logits (..., vocabulary).

    Top-p keeps the smallest set of most likely tokens whose probabilities sum to at least ``top_p``.
    """
    if top_k > 0:
        logits = logits.masked_fill(logits < logits.topk(top_k, dim=-1).values[..., -1:], float("-inf"))
    log_probs = torch.log_softmax(logits.double() / temperature, dim=-1)
    if top_p >= 1.0:
        return log_probs
    ordered, order = log_probs.exp().sort(dim=-1, descending=True)
    before = ordered.cumsum(dim=-1) - ordered
    keep = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before < top_p)
    return torch.log_softmax(log_probs.masked_fill(~keep, float("-inf")), dim=-1)

"""A full-size target without training: each token is followed by the next one of a fixed chain."""

from __future__ import annotations

import math
import random
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from megatron_tlt.bench.tiny_models import write_tiny_model


def chain_responses(count: int, length: int, vocab_size: int, certainty: float, seed: int) -> list[tuple[int, ...]]:
    """Sequences as the model samples them at temperature 1, computed without the model."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        tokens = [draw.randrange(vocab_size)]
        while len(tokens) < length:
            likely = (tokens[-1] + 1) % vocab_size
            tokens.append(likely if draw.random() < certainty else draw.randrange(vocab_size))
        found.append(tuple(tokens))
    return found


def write_chain_model(
    folder: Path, num_layers: int, vocab_size: int, certainty: float | None = None, hidden_size: int = 768
) -> Path:
    """Writes a chain model; 12 layers of width 768, or 26 of width 512, have 105 million weights.

    The output layer matches the embedding of a token's predecessor, and layers add little to their input. So a batch of
    another size, which rounds differently, still decodes the recorded tokens at the precision of rollouts. A step costs
    as much as for any model of this shape. At temperature 1 the chain's next token has probability ``certainty`` on
    average, and all others share the rest; without ``certainty`` it has a probability above chance.
    """
    write_tiny_model(
        "qwen2-untied",
        folder,
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=max(1, hidden_size // 192),
        vocab_size=vocab_size,
        max_position_embeddings=4096,
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_(0.01)
        embeddings = model.get_input_embeddings().weight
        embeddings.normal_(generator=torch.Generator().manual_seed(1))
        head = model.get_output_embeddings().weight
        head.copy_(embeddings.roll(1, 0) / embeddings.shape[1])
        if certainty is not None:
            head.mul_(_sharpness(model(torch.arange(vocab_size)[:, None]).logits[:, -1], certainty))
    model.save_pretrained(folder)
    return folder


def _sharpness(logits_VV: torch.Tensor, certainty: float) -> float:
    """The factor for logits after each token that gives the next token this mean probability."""
    low, high = 1.0, 1000.0
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        likely = (middle * logits_VV).softmax(dim=1).roll(-1, 1).diagonal().mean()
        low, high = (middle, high) if likely < certainty else (low, middle)
    return high

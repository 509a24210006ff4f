"""Tiny random EAGLE and EAGLE-3 heads for a target's folder, named as published heads name their tensors."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file


def build_eagle_head(
    kind: str, target: Path, folder: Path, seed: int = 0, scale: float = 0.3, drafted: int | None = None
) -> Path:
    """Write a head of one layer: ``eagle`` shares the target's embedding and output head, ``eagle3`` its embedding.

    ``scale`` is the standard deviation of the weights; ``drafted`` tokens can be drafted by EAGLE-3, all unless given.
    """
    model = json.loads((target / "config.json").read_text())
    hidden, width, vocab = model["hidden_size"], model["intermediate_size"], model["vocab_size"]
    heads, groups = model["num_attention_heads"], model["num_key_value_heads"]
    head = model.get("head_dim") or hidden // heads
    layer, inputs = ("layers.0", hidden) if kind == "eagle" else ("midlayer", 2 * hidden)
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, 2 * hidden if kind == "eagle" else 3 * hidden),
        f"{layer}.self_attn.q_proj.weight": (heads * head, inputs),
        f"{layer}.self_attn.k_proj.weight": (groups * head, inputs),
        f"{layer}.self_attn.v_proj.weight": (groups * head, inputs),
        f"{layer}.self_attn.o_proj.weight": (hidden, heads * head),
        f"{layer}.mlp.gate_proj.weight": (width, hidden),
        f"{layer}.mlp.up_proj.weight": (width, hidden),
        f"{layer}.mlp.down_proj.weight": (hidden, width),
        f"{layer}.post_attention_layernorm.weight": (hidden,),
    }
    config = {
        "architectures": ["LlamaForCausalLM" if kind == "eagle" else "LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": head,
        "vocab_size": vocab,
        "max_position_embeddings": model["max_position_embeddings"],
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    if kind == "eagle3":
        for norm in (f"{layer}.input_layernorm", f"{layer}.hidden_norm", "norm"):
            shapes[f"{norm}.weight"] = (hidden,)
        shapes["lm_head.weight"] = (drafted or vocab, hidden)
        config["draft_vocab_size"] = drafted or vocab
        config["eagle_aux_hidden_state_layer_ids"] = [0, 1, 2]
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.rand(shape, generator=generator) + 0.5
        if "norm" in name
        else torch.randn(shape, generator=generator) * scale
        for name, shape in shapes.items()
    }
    if drafted:
        ids = torch.randperm(vocab, generator=generator)[:drafted].sort().values
        tensors["d2t"] = ids - torch.arange(drafted)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder

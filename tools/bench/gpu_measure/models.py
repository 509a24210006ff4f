"""Models of a measured shape with random weights, and heads for them; built on the device where there is one."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import torch

from tools.bench.gpu_measure.environment import repository_root
from tools.bench.gpu_measure.measurement import Settings

SMALL: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "vocab_size": 512,
}
"""The rehearsal's shape; vLLM's CPU attention takes heads of 64."""
SHARPNESS = 60.0
"""Logit of the chain's next token; all others together have a probability below 1e-15 in bfloat16."""


def dtype_of(settings: Settings) -> torch.dtype:
    """The dtype of weights: float32 on a CPU, where bfloat16 is slow without AMX."""
    return torch.bfloat16 if settings.on_gpu else torch.float32


def write_config(folder: Path, shape: str, settings: Settings, **changes: Any) -> dict[str, Any]:
    """Writes the ``config.json`` of ``launch/architectures/qwen2.5-<shape>.json``, or the rehearsal's; returns it."""
    file = repository_root() / "launch" / "architectures" / f"qwen2.5-{shape}.json"
    config = dict(SMALL) if settings.small else json.loads(file.read_text(encoding="utf-8"))
    config |= {"torch_dtype": str(dtype_of(settings)).removeprefix("torch."), "eos_token_id": None, **changes}
    config["bos_token_id"] = None
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return config


def weight_map(folder: Path) -> Any:
    """The ``WeightMap`` of a folder's config."""
    from megatron_tlt.models.hf_folder import read_hf_config
    from megatron_tlt.models.weight_map import WeightMap

    return WeightMap(read_hf_config(folder))


def write_weights(folder: Path, settings: Settings) -> int:
    """Writes normally distributed weights beside a ``config.json``; returns the number of parameters."""
    from safetensors.torch import save_file

    weights, device = weight_map(folder), torch.device(settings.device)
    tensors = {}
    for name, shape in weights.shapes.items():
        tensor = torch.empty(shape, dtype=dtype_of(settings), device=device)
        tensors[name] = draw(tensor, name).cpu()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return int(weights.num_parameters)


@torch.no_grad()
def draw(tensor: torch.Tensor, name: str, std: float = 0.02) -> torch.Tensor:
    """Fills a tensor by its name: norms 1, biases 0, others N(0, std); the same on every call."""
    if "norm" in name:
        return tensor.fill_(1.0)
    if name.endswith("bias"):
        return tensor.zero_()
    generator = torch.Generator(device=tensor.device).manual_seed(zlib.crc32(name.encode()))
    return tensor.normal_(0.0, std, generator=generator)


@torch.no_grad()
def fill_random(engine: Any, version: int, std: float = 0.05) -> None:
    """Gives an engine random weights in place, as an update to ``version``."""
    engine.begin_update("policy")
    for name, view, _ in engine.read_weights():
        draw(view, name, std)
    engine.finish_update("policy", version)


@torch.no_grad()
def fill_chain(engine: Any, version: int) -> None:
    """Gives an engine weights with which each token is followed by the next id, at any batch size and temperature 1.

    A step costs as much as for any weights of this shape (compare ``bench/chain_model.py``). The model's head must
    not be tied to its embedding.
    """
    engine.begin_update("policy")
    embedding = None
    for name, view, _ in engine.read_weights():
        if name == "model.embed_tokens.weight":
            embedding = draw(view, name, 1.0)
        elif name == "lm_head.weight":
            assert embedding is not None, "the LM head comes before the embedding"
            view.copy_(embedding.roll(1, 0)).mul_(SHARPNESS / view.shape[1])
        else:
            draw(view, name, 0.0002 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02)
    engine.finish_update("policy", version)


def chain_response(prompt: tuple[int, ...], length: int, vocab_size: int) -> list[int]:
    """What the model of ``fill_chain`` says after a prompt."""
    return [(prompt[-1] + 1 + i) % vocab_size for i in range(length)]


def write_head(folder: Path, target: Path, settings: Settings, kind: str = "eagle3", draft_vocab: int = 32768) -> Path:
    """Writes a head with random weights for the target's shape; ``draft_vocab`` is bounded by the vocabulary."""
    from safetensors.torch import save_file

    from megatron_tlt.drafter import folder as drafters
    from megatron_tlt.drafter.model import SharedWeights
    from megatron_tlt.models.hf_folder import read_hf_config

    config = read_hf_config(target)
    own = drafters.draft_config(config, kind, None, min(draft_vocab, int(config.vocab_size)))
    with torch.device("meta"):
        shared = torch.empty(config.vocab_size, config.hidden_size)
        model = drafters.model_class(kind)(own, SharedWeights(shared, shared))
    folder.mkdir(parents=True)
    tensors = {}
    for name, meta in model.state_dict().items():
        if meta.is_floating_point():
            tensors[name] = draw(torch.empty(meta.shape, dtype=dtype_of(settings)), name)
        else:
            tensors[name] = torch.zeros(meta.shape, dtype=meta.dtype)  # draft id i is the target's id i
    drafters.write_config(model, folder, dtype_of(settings))
    save_file(tensors, folder / drafters.WEIGHTS, metadata={"format": "pt"})
    return folder

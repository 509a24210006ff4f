"""Holds the map of weights against mbridge's conversion, on random tensors, for two tensor-parallel ranks."""

from __future__ import annotations

import torch

from megatron_tlt.bench.tiny_models import TINY_MODELS, family_config
from megatron_tlt.models.weight_map import WeightMap
from megatron_tlt.platform.device import initialize_distributed, prepare

_FUSED = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


def transformer_engine_name(parameter: str, moe: bool) -> str:
    """What mbridge calls it."""
    head, _, tail = parameter.partition(".mlp.experts.")
    if tail:
        expert, _, kind = tail.partition(".")
        return f"{head}.mlp.experts.{kind}{expert}"
    for local, fused in _FUSED.items():
        if parameter.endswith(f".{local}") and not (moe and local.startswith("pre_mlp")):
            return parameter.removesuffix(local) + fused
    return parameter


def main() -> None:
    prepare()
    initialize_distributed()
    from mbridge import AutoBridge
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    for name in ("qwen2-untied", "llama", "qwen3-tied", "mixtral", "qwen3-moe"):
        model_type, options = TINY_MODELS[name]
        config = family_config(model_type, **{"head_dim": 16, **options})
        weights, bridge = WeightMap(config), AutoBridge.from_config(config, dtype=torch.float32)
        generator = torch.Generator().manual_seed(0)
        tensors = {n: torch.randn(shape, generator=generator) for n, shape in weights.shapes.items()}
        for parameter in weights.parameters:
            theirs = transformer_engine_name(parameter, bool(weights.num_experts))
            merged = bridge._weight_to_mcore_format(
                theirs, [tensors[n] for n in bridge._weight_name_mapping_mcore_to_hf(theirs)]
            )
            for rank in range(2):
                pieces = weights.pieces(parameter, rank, 2)
                ours = torch.cat([tensors[p.name].narrow(p.dim, p.start, p.length) for p in pieces], dim=pieces[0].dim)
                expected = bridge._weight_split_across_tp(theirs, merged, ours, 2)[rank]
                assert torch.equal(ours, expected), (name, parameter, rank)
        print("same:", name)


if __name__ == "__main__":
    main()

"""Qwen3 mixtures of experts (30B-A3B, 235B-A22B)."""

from megatron_tlt.models.family import Experts, Family

FAMILY = Family(
    "qwen3_moe",
    qk_layernorm=True,
    experts=Experts(
        width="moe_intermediate_size",
        normalize="norm_topk_prob",
        router="mlp.gate.weight",
        gate="mlp.experts.{expert}.gate_proj.weight",
        up="mlp.experts.{expert}.up_proj.weight",
        down="mlp.experts.{expert}.down_proj.weight",
    ),
    # In all released models every layer is a mixture of experts.
    options={"decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},
)

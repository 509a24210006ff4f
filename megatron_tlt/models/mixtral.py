"""Mixtral (8x7B, 8x22B)."""

from megatron_tlt.models.family import Experts, Family

FAMILY = Family(
    "mixtral",
    experts=Experts(
        width="intermediate_size",
        normalize=None,
        router="block_sparse_moe.gate.weight",
        gate="block_sparse_moe.experts.{expert}.w1.weight",
        up="block_sparse_moe.experts.{expert}.w3.weight",
        down="block_sparse_moe.experts.{expert}.w2.weight",
    ),
    options={"router_jitter_noise": (0.0,)},
)

"""Qwen2 and Qwen2.5."""

from megatron_tlt.models.family import Family

FAMILY = Family("qwen2", qkv_bias=True)

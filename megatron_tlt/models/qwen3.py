"""Qwen3, dense."""

from megatron_tlt.models.family import Family

FAMILY = Family("qwen3", qk_layernorm=True)

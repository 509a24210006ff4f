"""Qwen3, dense."""

from __future__ import annotations

from megatron_tlt.models.family import Family

FAMILY = Family("qwen3", qk_layernorm=True)

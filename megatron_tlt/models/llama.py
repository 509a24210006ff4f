"""Llama 2 and 3.x."""

from __future__ import annotations

from megatron_tlt.models.family import Family

FAMILY = Family("llama")

"""Llama 2 and 3.x."""

from megatron_tlt.models.family import Family

FAMILY = Family("llama")

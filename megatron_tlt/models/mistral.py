"""Mistral releases without a sliding window (7B v0.3 and later)."""

from megatron_tlt.models.family import Family

FAMILY = Family("mistral")

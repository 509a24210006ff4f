"""A config that asks for bfloat16 is told where the processors emulate it."""

from __future__ import annotations

import pytest

from megatron_tlt.cli.preflight import processor_flags, slow_bfloat16
from megatron_tlt.config.schema import TltConfig

PLAIN = ("fpu", "avx2")


def config_of(bf16: bool, dtype: str) -> TltConfig:
    tasks = [{"name": "chain_sum"}]
    values = {"model": {"recipe": {}}, "tasks": tasks, "actor": {"megatron": {"bf16": bf16}}}
    return TltConfig.model_validate({**values, "rollout": {"vllm": {"dtype": dtype}}})


@pytest.mark.parametrize(
    ("bf16", "dtype", "named"),
    [
        (True, "bfloat16", "actor.megatron.bf16 and rollout.vllm.dtype select"),
        (False, "bfloat16", "rollout.vllm.dtype select"),
        (True, "float32", "actor.megatron.bf16 select"),
    ],
)
def test_each_key_is_named(bf16: bool, dtype: str, named: str) -> None:
    note = slow_bfloat16(config_of(bf16, dtype), PLAIN)
    assert note is not None and note.startswith(named)
    for fast in ("avx512_bf16", "amx_bf16", "bf16"):
        assert slow_bfloat16(config_of(bf16, dtype), (*PLAIN, fast)) is None


def test_float32_is_fine_everywhere() -> None:
    assert slow_bfloat16(config_of(False, "float32"), PLAIN) is None


def test_this_machines_flags_are_read() -> None:
    flags = processor_flags()
    assert flags is None or len(flags) > 5

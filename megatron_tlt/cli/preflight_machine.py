"""Warns about config settings that this machine's processors support poorly; does not import torch."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from megatron_tlt.config.schema import TltConfig

_FAST_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Flags of CPUs with bfloat16 multiplication in hardware, in Linux's names (``bf16``: Arm)."""


def processor_flags() -> frozenset[str] | None:
    """Flags of the first processor; None if the system does not report them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = next((line for line in lines if line.startswith(("flags", "Features"))), None)
    return None if found is None else frozenset(found.partition(":")[2].split())


def has_gpu() -> bool:
    """Whether NVIDIA's driver is loaded here."""
    return Path("/dev/nvidiactl").exists()


def slow_bfloat16(config: TltConfig, flags: Collection[str]) -> str | None:
    """A note if the config uses bfloat16 on CPUs that, by these flags, emulate it."""
    keys = []
    if config.actor.megatron.get("bf16"):
        keys.append("actor.megatron.bf16")
    if config.rollout.vllm.get("dtype") == "bfloat16":
        keys.append("rollout.vllm.dtype")
    if not keys or _FAST_BFLOAT16.intersection(flags):
        return None
    return (
        f"{' and '.join(keys)} select bfloat16, but this machine's processors have no instructions for it (AMX, "
        "AVX-512 BF16): about ten times slower than float32 (actor.megatron.bf16=false rollout.vllm.dtype=float32)"
    )

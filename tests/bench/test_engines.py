"""Several engines in one process: possible on a GPU too."""

from __future__ import annotations

import pytest
import torch

from megatron_tlt.bench.engines import one_of_several
from megatron_tlt.config.schema import RolloutConfig
from megatron_tlt.platform.device import Device


def test_on_a_gpu_engines_share_memory_and_do_not_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    given = RolloutConfig(vllm={"kv_cache_memory_bytes": 123})
    assert one_of_several(given) is given
    gpu = Device(torch.device("cuda", 0), "nccl")
    monkeypatch.setattr("megatron_tlt.bench.engines.current_device", lambda: gpu)
    assert one_of_several(given).vllm == {"enable_sleep_mode": False, "kv_cache_memory_bytes": 123}
    assert one_of_several(RolloutConfig()).vllm["kv_cache_memory_bytes"] == 4 << 30

"""Deterministic kernels are asked of Megatron too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_tlt.actor.megatron_config import transformer_config
from megatron_tlt.config.schema import ActorConfig
from megatron_tlt.models.hf_folder import read_hf_config


def test_megatron_is_deterministic_where_torch_is(models: Path, request: pytest.FixtureRequest) -> None:
    hf_config = read_hf_config(models / "dense")
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    for chosen in (False, True):
        torch.use_deterministic_algorithms(chosen, warn_only=True)
        assert transformer_config(hf_config, ActorConfig()).deterministic_mode is chosen

"""The start-up check names what is wrong, and the patch keeps the contract of the function it replaces."""

from __future__ import annotations

import pytest
import torch

from megatron_tlt.errors import RunError
from megatron_tlt.rollout.vllm_patches import expand_batch_to_tokens
from megatron_tlt.rollout.vllm_versions import check_version, check_vllm, missing_attributes


def test_the_installed_release_fits() -> None:
    assert check_vllm().startswith("0.32.")


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.32.0", "0.3.2"])
def test_another_release_is_refused_by_name(version: str) -> None:
    with pytest.raises(RunError, match=rf"vllm {version} is installed; .* 0\.32\.x or 0\.26\.x"):
        check_version(version)


def test_all_supported_releases_pass_and_a_missing_one_is_named() -> None:
    for version in ("0.32.0", "0.32.1+cpu", "0.26.0"):
        check_version(version)
    with pytest.raises(RunError, match="vllm is not installed"):
        check_version(None)


def test_a_moved_attribute_is_named() -> None:
    required = (
        ("vllm", "SamplingParams"),
        ("vllm.v1.engine.llm_engine", "LLMEngine.gone"),
        ("vllm.no_such_module", "x"),
    )
    assert missing_attributes(required) == ["vllm.v1.engine.llm_engine.LLMEngine.gone", "vllm.no_such_module.x"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_expand_repeats_each_value_once_per_token(dtype: torch.dtype) -> None:
    values = torch.tensor([3, 0, 5, 7], dtype=dtype)
    sums = torch.tensor([2, 5, 5, 6], dtype=torch.int32)
    plain = expand_batch_to_tokens(values, sums, 6)
    assert plain.dtype == dtype and plain.tolist() == [3, 3, 0, 0, 0, 7]
    replaced = expand_batch_to_tokens(values, sums, 6, replace_from=0, replace_to=1)
    assert replaced.dtype == dtype and replaced.tolist() == [3, 3, 1, 1, 1, 7]

"""One tiny model and its engines, shared by this folder's tests (an engine takes seconds to start)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from megatron_tlt.config.schema import NgramConfig, RolloutConfig, SpeculationConfig
from tests.helpers.tiny_models import build_qwen2, load_qwen2

if TYPE_CHECKING:
    from transformers import Qwen2ForCausalLM

    from megatron_tlt.rollout.vllm_engine import VllmEngine

VOCAB = 32
# blocks of 32 tokens (128 by default on a CPU), so that these short prompts meet the prefix cache
ROLLOUT = RolloutConfig(
    max_prompt_tokens=80,
    max_response_tokens=64,
    vllm={"dtype": "float32", "max_num_seqs": 256, "block_size": 32},
)
# single tokens are looked up, so that any prompt which holds the whole vocabulary leads to drafts at every position
SPECULATION = SpeculationConfig(num_speculative_tokens=3, ngram=NgramConfig(prompt_lookup_min=1, prompt_lookup_max=3))


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_qwen2(tmp_path_factory.mktemp("qwen2"), vocab_size=VOCAB, tie=False, scale=0.16)


@pytest.fixture(scope="session")
def reference(model_folder: Path) -> Qwen2ForCausalLM:
    return load_qwen2(model_folder)


@pytest.fixture(scope="session")
def engine(model_folder: Path) -> Iterator[VllmEngine]:
    """An engine that speculates."""
    from megatron_tlt.rollout.vllm_engine import VllmEngine

    engine = VllmEngine(model_folder, ROLLOUT, SPECULATION, seed=7)
    yield engine
    engine.shutdown()


@pytest.fixture(scope="session")
def plain_engine(model_folder: Path, engine: VllmEngine) -> Iterator[VllmEngine]:
    """An engine built without speculation (after the other one, which owns the process group)."""
    from megatron_tlt.rollout.vllm_engine import VllmEngine

    engine = VllmEngine(model_folder, ROLLOUT, SpeculationConfig(enabled=False), seed=7)
    yield engine
    engine.shutdown()

"""What the collector refuses before an engine sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from megatron_tlt.data.tokenizer_training import train_tokenizer
from megatron_tlt.errors import ConfigError
from megatron_tlt.observe.timeline import Timeline
from megatron_tlt.rollout.types import SamplingSpec
from megatron_tlt.tasks.types import Problem
from megatron_tlt.trainer.experience import ExperienceCollector


def test_a_prompt_over_the_limit_is_named_with_both_lengths(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["sum 1+2"], 104, tmp_path / "tokenizer")
    unused = cast(Any, None)
    collector = ExperienceCollector(
        unused,
        tokenizer,
        unused,
        max_prompt_tokens=6,
        max_response_tokens=8,
        tensor_parallel_size=1,
        timeline=Timeline(0),
    )
    problem = Problem("chain_sum/7", "chain_sum", "sum 1+2", "3", "reasoning_gym")
    with pytest.raises(ConfigError, match=r"chain_sum/7: its prompt has 7 tokens; .*max_prompt_tokens: 6"):
        collector.collect([problem], 1, SamplingSpec(), (0,))

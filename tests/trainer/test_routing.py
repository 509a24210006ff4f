"""A run whose actor takes the engine's experts."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_tlt.bench.tiny_models import write_tiny_model
from megatron_tlt.data.tokenizer_training import train_tokenizer
from tests.trainer.conftest import Runs, rows_of

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_run_replays_experts_with_drafts_and_on_several_ranks(runs: Runs, tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_tiny_model("qwen3-moe", model, vocab_size=104, head_dim=32)
    train_tokenizer([], 104, model)
    given = (
        f"model={{path: {model}}}",
        "actor.megatron={expert_model_parallel_size: 2}",
        "actor.optimizer.lr=1.0e-4",
        "speculation.drafter=ngram",
        "evaluation.every=0",
        "trainer.steps=2",
        "trainer.mini_batches=2",
    )
    for mode, limit in (("ids", 1e-4), ("ids_and_weights", 1e-2)):
        runs.train(mode, *given, f"rollout.router_replay={mode}")
        for row in rows_of(runs.folder / mode):
            assert 0.9 < row["actor/router_agreement"] <= 1
            assert row["mismatch/mean_abs"] < limit, "float16 rounds the weights"

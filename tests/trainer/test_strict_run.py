"""A strict run that is replayed under another layout ends with the same weights."""

from __future__ import annotations

import json

import pytest

from tests.trainer.conftest import Runs, rows_of

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(1800)]  # two runs from nothing

STRICT = (
    "elastic.strict=true",
    "elastic.logical_shards=4",
    "actor.megatron.hidden_dropout=0.0",
    "trainer.mini_batches=2",
    "trainer.steps=3",
    "evaluation.every=0",
)


def test_recorded_responses_lead_to_the_same_bits_on_two_stages_as_on_two_replicas(runs: Runs) -> None:
    untied = "model.recipe.architecture.tie_word_embeddings=false"
    runs.train("strict-dp2", *STRICT, untied, "observe.recording=true")
    recorded = runs.folder / "strict-dp2"
    (model,) = (
        path.parent for path in (runs.folder / "models").glob("*/config.json") if not _is_tied(path.read_text())
    )
    arguments = json.dumps({"path": str(recorded / "recording")})
    replay = ("rollout.engine=replay", f"rollout.engine_arguments={arguments}", "rollout.vllm=null")
    without = ("speculation.enabled=false", "reshard.method=none", "model.recipe=null", f"model.path={model}")
    runs.train("strict-pp2", *STRICT, *replay, *without, "actor.megatron.pipeline_model_parallel_size=2")
    replayed = runs.folder / "strict-pp2"

    weights = [folder / "hf" / "model.safetensors" for folder in (recorded, replayed)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    ours, theirs = rows_of(replayed), rows_of(recorded)
    assert len(ours) == 3 and all((row["actor/grad_norm"] or 0) > 1e-3 for row in ours), "equal bits would show nothing"
    names = ("actor/loss", "actor/grad_norm", "actor/entropy", "reward/mean", "mismatch/mean_abs")
    assert [[row[name] for name in names] for row in ours] == [[row[name] for name in names] for row in theirs]


def _is_tied(config: str) -> bool:
    return bool(json.loads(config)["tie_word_embeddings"])

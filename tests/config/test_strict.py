"""What goes with ``elastic.strict``, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_tlt.config.identity import identifies_run
from megatron_tlt.config.loader import dump_resolved, load_config, load_resolved
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.config.shipped import LAUNCH
from megatron_tlt.config.source import deep_merge
from megatron_tlt.config.strict import logical_shards, strict_violations
from megatron_tlt.errors import ConfigError

MODEL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "tie_word_embeddings": False,
}
BASE: dict[str, Any] = {
    "model": {"path": "m"},
    "tasks": [{"name": "gcd"}],
    "launcher": {"nproc_per_node": 4},
    "elastic": {"strict": True, "logical_shards": 8},
    "trainer": {"prompts_per_step": 8},
    "algorithm": {"group_size": 4},
}


def violations(sections: dict[str, Any], model: dict[str, Any] | None = None) -> list[str]:
    config = TltConfig.model_validate(deep_merge(json.loads(json.dumps(BASE)), sections))
    return list(strict_violations(config, MODEL | (model or {}), "config.json"))


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"elastic": {"logical_shards": None}},
        {"elastic": None},
        {"elastic": {"strict": False, "logical_shards": None}, "stream": {}},
        {"actor": {"megatron": {"pipeline_model_parallel_size": 2, "bf16": True, "context_parallel_size": 1}}},
        {"actor": {"megatron": {"attention_dropout": 0.0, "virtual_pipeline_model_parallel_size": None}}},
        {"actor": {"optimizer": {"lr": 1e-5, "adam_beta2": 0.95, "clip_grad": 1.0}, "ddp": {"bucket_size": 1000}}},
        {"actor": {"optimizer": {"optimizer": "torch.optim.NAdam"}, "optimizer_sharding": "element"}},
        {"actor": {"optimizer": {"optimizer": "sgd"}}},
        {"actor": {"optimizer": {"optimizer": "sgd"}, "optimizer_sharding": "element"}},
    ],
)
def test_what_goes_together(sections: dict[str, Any]) -> None:
    assert violations(sections) == []


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"elastic": {"strict": False}}, "elastic.logical_shards: found 8 without elastic.strict"),
        ({"elastic": {"logical_shards": 6}}, "elastic.logical_shards: found 6 with data parallelism 4"),
        ({"elastic": {"logical_shards": 2}}, "elastic.logical_shards: found 2 with data parallelism 4"),
        ({"launcher": {"nproc_per_node": 3}}, "elastic.logical_shards: found 8 with data parallelism 3"),
        ({"elastic": {"logical_shards": 64}}, "elastic.logical_shards: found 64; allowed: at most the 32 responses"),
        ({"trainer": {"mini_batches": 8}}, "elastic.logical_shards: found 8; allowed: at most the 4 responses"),
        ({"stream": {}}, "stream: found a section"),
        ({"speeds": {"actor": [1.0, 0.5, 1.0, 1.0]}}, "speeds.actor: found [1.0, 0.5, 1.0, 1.0]"),
        *(
            ({"actor": {"megatron": {key: value}}}, f"actor.megatron.{key}: found {value!r}")
            for key, value in (
                ("virtual_pipeline_model_parallel_size", 2),
                ("context_parallel_size", 2),
                ("attention_dropout", 0.1),
                ("hidden_dropout", 0.1),
                ("fp32_residual_connection", True),
                ("fp8", "e4m3"),
                ("tp_comm_overlap", True),
            )
        ),
        *(
            ({"actor": {"ddp": {key: True}}}, f"actor.ddp.{key}: found True")
            for key in ("overlap_grad_reduce", "overlap_param_gather", "check_for_nan_in_grad")
        ),
        *(
            ({"actor": {"optimizer": {key: value}}}, f"actor.optimizer.{key}: found {value!r}")
            for key, value in (("loss_scale", 8.0), ("optimizer_cpu_offload", True))
        ),
        (
            {"actor": {"optimizer": {"optimizer": "torch.optim.Muon"}}},
            "actor.optimizer_sharding: found auto with torch.optim.Muon",
        ),
        *(
            (
                {"actor": {"optimizer": {"optimizer": "sgd"}, "optimizer_sharding": sharding}},
                f"actor.optimizer_sharding: found {sharding} with sgd",
            )
            for sharding in ("tensor", "coupled")
        ),
        ({"actor": {"lora": {}, "transformer_impl": "local"}}, "actor.lora: found a section"),
    ],
)
def test_what_is_refused(sections: dict[str, Any], said: str) -> None:
    found = violations(sections)
    assert found and found[0].startswith(said) and all("; allowed" in line for line in found), found


def test_models_that_cannot_be_strict() -> None:
    (line,) = violations({}, {"tie_word_embeddings": True})
    assert line.startswith("config.json.tie_word_embeddings: found true") and line.endswith("strict: false")
    (line,) = violations({}, {"num_experts": 8, "moe_intermediate_size": 32})
    assert "8 experts" in line and line.endswith("allowed: a dense model")


def test_the_rules_are_applied_when_a_config_is_read(tmp_path: Path) -> None:
    given = ["elastic.strict=true", "actor.ddp.overlap_grad_reduce=false", "actor.ddp.overlap_param_gather=false"]
    name = LAUNCH / "qwen2.5-7b-1n8g.yaml"
    with pytest.raises(ConfigError, match=r"elastic.logical_shards: found 3 with data parallelism 2; allowed"):
        load_config(name, [*given, "elastic.logical_shards=3"], check_libraries=False)
    found = load_config(name, [*given, "elastic.logical_shards=4"], check_libraries=False)
    path = tmp_path / "resolved.yaml"
    path.write_text(dump_resolved(found))
    assert load_resolved(path) == found and logical_shards(found) == 4


def test_the_shards_are_by_default_the_data_parallel_size_and_identify_no_run() -> None:
    assert logical_shards(TltConfig.model_validate({**BASE, "elastic": {"strict": True}})) == 4
    assert logical_shards(TltConfig.model_validate({**BASE, "elastic": {}})) is None
    assert not identifies_run("elastic.strict") and not identifies_run("elastic.logical_shards")

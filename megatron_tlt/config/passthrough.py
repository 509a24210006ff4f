"""Checks the pass-through dictionaries (``actor.megatron``, ``rollout.vllm``, ...) against the installed libraries."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron_tlt.config.libraries import OPEN, FieldType, library_fields
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.config.violations import closest

_MODEL_FOLDER = "config.json of the model folder (model.path or model.recipe.architecture)"


@dataclass(frozen=True)
class PassThrough:
    """One dictionary of the config and the dataclass that it is passed to.

    ``owned`` maps each field that this project sets itself to the key or component that determines it.
    """

    path: str
    module: str
    class_name: str
    owned: dict[str, str] = field(default_factory=dict)


_MEGATRON_OWNED = {
    "num_layers": _MODEL_FOLDER,
    "hidden_size": _MODEL_FOLDER,
    "num_attention_heads": _MODEL_FOLDER,
    "num_query_groups": _MODEL_FOLDER,
    "ffn_hidden_size": _MODEL_FOLDER,
    "kv_channels": _MODEL_FOLDER,
    "layernorm_epsilon": _MODEL_FOLDER,
    "normalization": _MODEL_FOLDER,
    "add_qkv_bias": _MODEL_FOLDER,
    "add_bias_linear": _MODEL_FOLDER,
    "gated_linear_unit": _MODEL_FOLDER,
    "activation_func": _MODEL_FOLDER,
    "qk_layernorm": _MODEL_FOLDER,
    "num_moe_experts": _MODEL_FOLDER,
    "moe_ffn_hidden_size": _MODEL_FOLDER,
    "moe_layer_freq": _MODEL_FOLDER,
    "moe_router_topk": _MODEL_FOLDER,
    "moe_router_pre_softmax": _MODEL_FOLDER,
    "moe_shared_expert_intermediate_size": _MODEL_FOLDER,
    "moe_grouped_gemm": "actor.transformer_impl",
    "transformer_impl": "actor.transformer_impl",
    "deterministic_mode": "run.deterministic",
    "params_dtype": "actor.megatron.bf16",
    "pipeline_dtype": "actor.megatron.bf16",
    "calculate_per_token_loss": "algorithm.loss_aggregation",
}

_VLLM_OWNED = {
    "model": "model.path or model.recipe",
    "tokenizer": "model.path or model.recipe",
    "skip_tokenizer_init": "the rollout engine, whose prompts are token ids",
    "seed": "run.seed",
    "tensor_parallel_size": "rollout.tensor_parallel_size",
    "pipeline_parallel_size": "rollout.tensor_parallel_size",
    "data_parallel_size": "launcher.nproc_per_node and launcher.nnodes",
    "distributed_executor_backend": "the rollout engine, which runs in process",
    "speculative_config": "speculation.*",
    "spec_method": "speculation.drafter",
    "spec_model": "speculation.drafter",
    "spec_tokens": "speculation.num_speculative_tokens",
    "logprobs_mode": "the rollout engine, which needs processed log-probs",
    "generation_config": "rollout.sampling",
    "async_scheduling": "the rollout engine, which drives vLLM step by step",
    "max_model_len": "rollout.max_prompt_tokens + rollout.max_response_tokens",
}

TARGETS = (
    PassThrough("actor.megatron", "megatron.core.transformer.transformer_config", "TransformerConfig", _MEGATRON_OWNED),
    PassThrough(
        "actor.ddp", "megatron.core.distributed.distributed_data_parallel_config", "DistributedDataParallelConfig"
    ),
    PassThrough("actor.optimizer", "megatron.core.optimizer.optimizer_config", "OptimizerConfig"),
    PassThrough("model.recipe.supervised.optimizer", "megatron.core.optimizer.optimizer_config", "OptimizerConfig"),
    PassThrough("rollout.vllm", "vllm.engine.arg_utils", "EngineArgs", _VLLM_OWNED),
)


def _at(config: TltConfig, path: str) -> dict[str, Any]:
    node: Any = config
    for part in path.split("."):
        node = getattr(node, part, None)
    return node or {}


def check_values(target: PassThrough, values: dict[str, Any], fields: dict[str, FieldType]) -> list[str]:
    """One line per key that is unknown to the dataclass, managed by this project, or of a wrong type."""
    problems = []
    for key, value in values.items():
        path = f"{target.path}.{key}"
        if key in target.owned:
            problems.append(f"{path}: cannot be set here; managed by {target.owned[key]}")
        elif key not in fields:
            near = closest(key, [name for name in fields if name not in target.owned])
            problems.append(f"{path}: unknown to the installed {target.class_name}; {near}")
        elif not fields.get(key, OPEN).accepts(value):
            problems.append(f"{path}: found {value!r}; allowed: {fields[key]}")
    return problems


def check_passthrough(config: TltConfig) -> list[str]:
    """The violations in all pass-through dictionaries whose library is installed."""
    problems: list[str] = []
    for target in TARGETS:
        if fields := library_fields(target.module, target.class_name):
            problems += check_values(target, _at(config, target.path), fields)
    return problems


def unchecked(config: TltConfig) -> list[str]:
    """One line per library that is not installed, with the pass-through dictionaries that need it to be checked."""
    paths: dict[str, list[str]] = {}
    for target in TARGETS:
        if _at(config, target.path) and not library_fields(target.module, target.class_name):
            paths.setdefault(target.module.partition(".")[0], []).append(target.path)
    return [f"{', '.join(found)}: cannot be checked, because {name} is not installed" for name, found in paths.items()]

"""Rules between keys: layouts that fit the world, batches that divide, a model that exists and is long enough."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from megatron_tlt.config.schema import ArchitectureConfig, TltConfig

# vLLM's CPU attention has no kernel for smaller heads.
_SMALLEST_HEAD = 32


def _size(config: TltConfig, name: str) -> int:
    value = config.actor.megatron.get(name, 1)
    # A wrong type is reported by the pass-through check.
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 1


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def _layout(config: TltConfig) -> Iterator[str]:
    world = config.launcher.world_size
    tp, pp, cp = (_size(config, f"{kind}_parallel_size") for kind in ("tensor_model", "pipeline_model", "context"))
    if world % (tp * pp * cp):
        yield (
            f"actor.megatron: tensor x pipeline x context parallel = {tp} x {pp} x {cp} = {tp * pp * cp} does not "
            f"divide the {world} processes of launcher.nnodes x launcher.nproc_per_node; allowed: {_divisors(world)}"
        )
    else:
        yield from _batches(config, world // (tp * pp * cp))
    if world % config.rollout.tensor_parallel_size:
        yield (
            f"rollout.tensor_parallel_size: found {config.rollout.tensor_parallel_size}; allowed: a divisor of the "
            f"{world} processes: {_divisors(world)}"
        )


def _batches(config: TltConfig, data_parallel: int) -> Iterator[str]:
    responses = config.trainer.prompts_per_step * config.algorithm.group_size
    parts = config.trainer.mini_batches
    if responses % parts:
        yield (
            f"trainer.mini_batches: found {parts}; allowed: a divisor of trainer.prompts_per_step x "
            f"algorithm.group_size = {responses}"
        )
    elif responses // parts < data_parallel:
        yield (
            f"trainer.mini_batches: found {parts}, which leaves {responses // parts} responses to a mini-batch; "
            f"allowed: at least one for each of the {data_parallel} data-parallel ranks"
        )
    engines = config.launcher.world_size // config.rollout.tensor_parallel_size
    if config.trainer.prompts_per_step < engines:
        yield (
            f"trainer.prompts_per_step: found {config.trainer.prompts_per_step}; allowed: at least one for each of "
            f"the {engines} engines (it need not divide)"
        )


def _heads(config: TltConfig, model: dict[str, Any], where: str) -> Iterator[str]:
    hidden, heads = model.get("hidden_size"), model.get("num_attention_heads")
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1:
        return
    groups = model.get("num_key_value_heads") or heads
    if not model.get("head_dim") and hidden % heads:
        yield f"{where}.num_attention_heads: found {heads}; allowed: a divisor of hidden_size = {hidden}"
    if heads % groups:
        yield f"{where}.num_key_value_heads: found {groups}; allowed: a divisor of num_attention_heads = {heads}"
    for key in ("actor.megatron.tensor_model_parallel_size", "rollout.tensor_parallel_size"):
        actor = key.startswith("actor")
        size = _size(config, "tensor_model_parallel_size") if actor else config.rollout.tensor_parallel_size
        if heads % size:
            yield f"{key}: found {size}; allowed: a divisor of the model's {heads} attention heads ({where})"
        elif actor and groups % size and size % groups:
            yield f"{key}: found {size}; allowed: a divisor or multiple of the {groups} key-value heads ({where})"


def _layers(config: TltConfig, model: dict[str, Any], where: str) -> Iterator[str]:
    layers, width = model.get("num_hidden_layers"), model.get("intermediate_size")
    stages = _size(config, "pipeline_model_parallel_size")
    chunks = _size(config, "virtual_pipeline_model_parallel_size")
    # Megatron's own keys for uneven stages say themselves how many layers each takes.
    uneven = any(key.endswith(("_pipeline_stage", "_parallel_layout")) for key in config.actor.megatron)
    if isinstance(layers, int) and not uneven and layers % (stages * chunks):
        yield (
            f"actor.megatron: pipeline x virtual pipeline parallel = {stages} x {chunks} = {stages * chunks}; allowed: "
            f"a divisor of the model's {layers} layers: {_divisors(layers)} ({where})"
        )
    tensor = _size(config, "tensor_model_parallel_size")
    if isinstance(width, int) and width % tensor:
        yield (
            f"actor.megatron.tensor_model_parallel_size: found {tensor}; allowed: a divisor of the model's "
            f"intermediate_size, {width} ({where})"
        )


def _recipe(config: TltConfig, architecture: ArchitectureConfig) -> Iterator[str]:
    where = "model.recipe.architecture"
    yield from _heads(config, architecture.model_dump(), where)
    yield from _layers(config, architecture.model_dump(), where)
    head = architecture.hidden_size // architecture.num_attention_heads
    if head < _SMALLEST_HEAD:
        yield (
            f"{where}: hidden_size / num_attention_heads = {head}; allowed: at least {_SMALLEST_HEAD} "
            "(vLLM's CPU attention takes no smaller head)"
        )
    yield from _positions(config, architecture.max_position_embeddings, where)
    recipe = config.model.recipe
    if recipe and recipe.supervised.max_sequence_tokens > architecture.max_position_embeddings:
        yield (
            f"model.recipe.supervised.max_sequence_tokens: found {recipe.supervised.max_sequence_tokens}; allowed: "
            f"at most max_position_embeddings = {architecture.max_position_embeddings}"
        )


def _positions(config: TltConfig, positions: int, where: str) -> Iterator[str]:
    total = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    if total > positions:
        yield (
            f"rollout: max_prompt_tokens + max_response_tokens = {total}; allowed: at most max_position_embeddings = "
            f"{positions} ({where})"
        )


def _model(config: TltConfig) -> Iterator[str]:
    if config.model.recipe is not None:
        yield from _recipe(config, config.model.recipe.architecture)
        return
    path = config.model.path
    if path is None:
        return
    if not path.is_dir():
        yield f"model.path: no folder {path}; allowed: a Hugging Face model folder"
        return
    try:
        model = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        yield f"model.path: no config.json in {path}; allowed: a Hugging Face model folder"
        return
    except (OSError, ValueError) as error:
        yield f"model.path: {path / 'config.json'} cannot be read: {error}"
        return
    if not isinstance(model, dict):
        yield f"model.path: {path / 'config.json'} holds no JSON object"
        return
    yield from _heads(config, model, str(path / "config.json"))
    yield from _layers(config, model, str(path / "config.json"))
    if isinstance(model.get("max_position_embeddings"), int):
        yield from _positions(config, model["max_position_embeddings"], str(path / "config.json"))


def _files(config: TltConfig) -> Iterator[str]:
    for index, task in enumerate(config.tasks):
        for key, path in (("path", task.path), ("held_out_path", task.held_out_path)):
            if path is not None and not path.is_file():
                yield f"tasks.{index}.{key}: no file {path}"


def _ngram(config: TltConfig) -> Iterator[str]:
    ngram = config.speculation.ngram
    if ngram.prompt_lookup_min > ngram.prompt_lookup_max:
        yield (
            f"speculation.ngram.prompt_lookup_min: found {ngram.prompt_lookup_min}; allowed: at most "
            f"prompt_lookup_max = {ngram.prompt_lookup_max}"
        )


def check_fields_together(config: TltConfig) -> list[str]:
    """Every rule between keys that does not hold, one line each."""
    return [line for rule in (_layout, _model, _files, _ngram) for line in rule(config)]

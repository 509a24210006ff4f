"""The rules of ``elastic.strict``: what sums in an order of its own is refused, each by its key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_tlt.config.layouts import Layout, ModelShape
from megatron_tlt.config.schema import TltConfig

_MEGATRON = {
    "context_parallel_size": "the ranks that share a sequence sum their gradients in a ring",
    "virtual_pipeline_model_parallel_size": "an interleaved pipeline needs micro-batches in multiples of its stages",
    "attention_dropout": "random numbers depend on the rank",
    "hidden_dropout": "random numbers depend on the rank",
    "fp32_residual_connection": "it is rounded between two stages",
    "fp8": "its scales depend on what a rank has seen",
    "fp4": "its scales depend on what a rank has seen",
    "tp_comm_overlap": "it sums parts as they come",
}
"""Options of ``actor.megatron`` that are refused unless off, with the reason."""
_SIZES = ("context_parallel_size", "virtual_pipeline_model_parallel_size")
_DDP = ("use_distributed_optimizer", "grad_reduce_in_fp32", "bucket_size")
_OPTIMIZER = ("optimizer", "lr", "min_lr", "weight_decay", "clip_grad", "bf16", "params_dtype")
_OF_ONE = ("adam_", "sgd_")


def forms_tree(shards: int, ranks: int) -> bool:
    """Whether so many data-parallel ranks can sum so many logical shards in one binary tree, each with a subtree."""
    return 0 < ranks <= shards and not shards & (shards - 1) and not ranks & (ranks - 1)


def logical_shards(config: TltConfig) -> int | None:
    """Number of parts that a batch is divided into whatever the data-parallel size; None without ``elastic.strict``."""
    elastic = config.elastic
    if elastic is None or not elastic.strict:
        return None
    return elastic.logical_shards or Layout.read(config.actor.megatron, config.launcher.world_size).dp


def strict_violations(config: TltConfig, model: dict[str, Any], where: str) -> Iterator[str]:
    """One line for each key that does not go with ``elastic.strict``; ``model`` is the contents of ``where``."""
    elastic, shards = config.elastic, logical_shards(config)
    if shards is None:
        if elastic is not None and elastic.logical_shards is not None:
            yield f"elastic.logical_shards: found {elastic.logical_shards} without elastic.strict; allowed: null"
        return
    yield from _shards(config, shards)
    yield from _model(model, where)
    yield from _actor(config)
    if config.speeds is not None and config.speeds.actor is not None:
        yield (
            f"speeds.actor: found {[*config.speeds.actor]}; each data-parallel rank has the same number of logical "
            "shards; allowed with elastic.strict: null"
        )
    if config.stream is not None:
        yield (
            "stream: found a section; its gradient is summed in an order of measured times; allowed with "
            "elastic.strict: null"
        )


def _shards(config: TltConfig, shards: int) -> Iterator[str]:
    dp = Layout.read(config.actor.megatron, config.launcher.world_size).dp
    if not forms_tree(shards, dp):
        yield (
            f"elastic.logical_shards: found {shards} with data parallelism {dp}; allowed: a power of two, at least the "
            "data parallelism, which is a power of two as well (null: equal to it)"
        )
    responses = config.trainer.prompts_per_step * config.algorithm.group_size // config.trainer.mini_batches
    if shards > responses:
        yield (
            f"elastic.logical_shards: found {shards}; allowed: at most the {responses} responses of a mini-batch, one "
            "for each shard"
        )


def _model(model: dict[str, Any], where: str) -> Iterator[str]:
    if model.get("tie_word_embeddings"):
        yield (
            f"{where}.tie_word_embeddings: found true; the gradient of tied embeddings is summed in another order at "
            "pipeline parallel 1 than at 2 or more; allowed with elastic.strict: false"
        )
    shape = ModelShape.read(model, where)
    if shape is not None and shape.experts:
        yield (
            f"elastic.strict: found true, and the model has {shape.experts} experts, which sum what the ranks send "
            f"them and balance over micro-batches ({where}); allowed: a dense model"
        )


def _actor(config: TltConfig) -> Iterator[str]:
    actor = config.actor
    for key, reason in _MEGATRON.items():
        found = actor.megatron.get(key)
        if found and not (key in _SIZES and found == 1):
            yield f"actor.megatron.{key}: found {found!r}; {reason}; allowed with elastic.strict: absent"
    for key, found in actor.ddp.items():
        if key not in _DDP and found:
            yield (
                f"actor.ddp.{key}: found {found!r}; gradients are summed in a tree of their own, not by Megatron-Core; "
                "allowed with elastic.strict: absent"
            )
    for key, found in actor.optimizer.items():
        if key not in _OPTIMIZER and not key.startswith(_OF_ONE) and found:
            yield (
                f"actor.optimizer.{key}: found {found!r}, which is not known to keep the bits; allowed with "
                "elastic.strict: absent"
            )
    name = actor.optimizer.get("optimizer", "adam")
    # adam always owns slices, sgd unless whole tensors are asked for; other classes are known to only with `element`
    owns_slices = name == "adam" or actor.optimizer_sharding in (("auto", "element") if name == "sgd" else ("element",))
    if not owns_slices:
        yield (
            f"actor.optimizer_sharding: found {actor.optimizer_sharding} with {name}; whole tensors are gathered from "
            "gradients that Megatron-Core reduces; allowed with elastic.strict: element, or the optimizers adam and sgd"
        )
    if actor.lora is not None:
        yield "actor.lora: found a section, whose factors are not in the tree; allowed with elastic.strict: null"

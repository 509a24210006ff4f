"""Rules between keys: layouts that fit the world, batch sizes that divide, and a suitable model."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from megatron_tlt.config.algorithm_checks import algorithm_violations
from megatron_tlt.config.drafter_kinds import KINDS, MODEL_FREE
from megatron_tlt.config.guard import guard_violations
from megatron_tlt.config.integrity import integrity_violations
from megatron_tlt.config.layouts import (
    Layout,
    ModelShape,
    listed_divisors,
    nearest,
    positive,
    problems,
    tensor_problems,
    wrong_values,
)
from megatron_tlt.config.migrations import LOWEST_TEMPERATURE
from megatron_tlt.config.model import RECIPE_ARCHITECTURE, read_model
from megatron_tlt.config.optimizer_checks import optimizer_violations
from megatron_tlt.config.runner_checks import runner_violations
from megatron_tlt.config.schedule import schedule_violations
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.config.speculation import SpeculationConfig
from megatron_tlt.config.speeds import speeds_violations
from megatron_tlt.config.stream import stream_violations
from megatron_tlt.config.strict import strict_violations
from megatron_tlt.config.tail import tail_violations
from megatron_tlt.errors import ConfigError

_MIN_HEAD_DIM = 32  # vLLM's CPU attention has no kernel for smaller heads
# Number of fitting layouts that the message for an unfitting one suggests.
_SUGGESTIONS = 3
# For a value that earlier releases accepted and that cannot be migrated.
_CONTINUE_AS_NEW_RUN = "to continue a run that has it, start a new run with model.path: its newest checkpoint"


def _layout(config: TltConfig, shape: ModelShape | None) -> Iterator[str]:
    world, given = config.launcher.world_size, config.actor.megatron
    layout = Layout.read(given, world)
    found = problems(layout, shape)
    yield from wrong_values(given)
    yield from found
    if found:
        yield _nearest(config, layout, shape)
    else:
        yield from _batches(config, layout)
    key, engine = "rollout.tensor_parallel_size", config.rollout.tensor_parallel_size
    if world % engine:
        yield f"{key}: found {engine}; allowed: a divisor of the {world} processes: {listed_divisors(world)}"
    if shape is not None:
        yield from tensor_problems(key, engine, shape)
        if shape.moe_ffn and shape.moe_ffn % engine and not config.rollout.vllm.get("enable_expert_parallel"):
            yield (
                f"{key}: found {engine}; allowed: a divisor of the width of the model's experts, {shape.moe_ffn}, or "
                f"any with rollout.vllm.enable_expert_parallel ({shape.where})"
            )


def _nearest(config: TltConfig, layout: Layout, shape: ModelShape | None) -> str:
    fitting = nearest(layout, shape, _SUGGESTIONS, _responses(config) // config.trainer.mini_batches)
    processes = f"{layout.world} processes" if layout.world > 1 else "one process"
    if fitting:
        return f"actor.megatron: the nearest layouts that fit {processes}: {', '.join(map(str, fitting))}"
    return f"actor.megatron: no layout of {processes} fits this model and the responses of a mini-batch"


def _responses(config: TltConfig) -> int:
    return config.trainer.prompts_per_step * config.algorithm.group_size


def _batches(config: TltConfig, layout: Layout) -> Iterator[str]:
    responses, parts = _responses(config), config.trainer.mini_batches
    if responses % parts:
        yield (
            f"trainer.mini_batches: found {parts}; allowed: a divisor of trainer.prompts_per_step x "
            f"algorithm.group_size = {responses}"
        )
    elif responses // parts < layout.dp:
        yield (
            f"trainer.mini_batches: found {parts}, which gives {responses // parts} responses per mini-batch; "
            f"allowed: at least one for each of the {layout.dp} data-parallel ranks"
        )
    engines = config.launcher.world_size // config.rollout.tensor_parallel_size
    if config.trainer.prompts_per_step < engines:
        yield (
            f"trainer.prompts_per_step: found {config.trainer.prompts_per_step}; allowed: at least one for each of "
            f"the {engines} engines (it need not divide)"
        )


def _model(config: TltConfig, model: dict[str, Any], where: str) -> Iterator[str]:
    names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings")
    hidden, heads, groups, positions = (positive(model, name) for name in names)
    if hidden and heads and not model.get("head_dim") and hidden % heads:
        yield f"{where}.num_attention_heads: found {heads}; allowed: a divisor of hidden_size = {hidden}"
    if heads and groups and heads % groups:
        yield f"{where}.num_key_value_heads: found {groups}; allowed: a divisor of num_attention_heads = {heads}"
    total = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    if positions and total > positions:
        yield (
            f"rollout: max_prompt_tokens + max_response_tokens = {total}; allowed: at most max_position_embeddings = "
            f"{positions} ({where})"
        )


def _recipe(config: TltConfig, model: dict[str, Any]) -> Iterator[str]:
    recipe = config.model.recipe
    if recipe is None:
        return
    architecture, longest = recipe.architecture, recipe.supervised.max_sequence_tokens
    head = architecture.hidden_size // architecture.num_attention_heads
    if recipe.base is None and head < _MIN_HEAD_DIM:
        yield (
            f"{RECIPE_ARCHITECTURE}: hidden_size / num_attention_heads = {head}; allowed: at least {_MIN_HEAD_DIM} "
            "(vLLM's CPU attention takes no smaller head)"
        )
    positions = positive(model, "max_position_embeddings")
    if positions and longest > positions:
        yield (
            f"model.recipe.supervised.max_sequence_tokens: found {longest}; allowed: at most "
            f"max_position_embeddings = {positions}"
        )


def _micro_batches(config: TltConfig) -> Iterator[str]:
    """A sequence is never split, so the longest one must fit into a micro-batch (``data.packing``)."""
    actor, rollout, recipe = config.actor, config.rollout, config.model.recipe
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    if actor.max_tokens_per_micro_batch < longest:
        yield (
            f"actor.max_tokens_per_micro_batch: found {actor.max_tokens_per_micro_batch}; allowed: at least "
            f"rollout.max_prompt_tokens + rollout.max_response_tokens = {longest}"
        )
    if recipe is None:
        return
    supervised = recipe.supervised
    if supervised.max_tokens_per_micro_batch < supervised.max_sequence_tokens:
        yield (
            "model.recipe.supervised.max_tokens_per_micro_batch: found "
            f"{supervised.max_tokens_per_micro_batch}; allowed: at least max_sequence_tokens = "
            f"{supervised.max_sequence_tokens}"
        )


def _precision(config: TltConfig) -> Iterator[str]:
    sections = {"actor.megatron": config.actor.megatron, "actor.optimizer": config.actor.optimizer}
    if config.model.recipe is not None:
        sections["model.recipe.supervised.optimizer"] = config.model.recipe.supervised.optimizer
    for path, values in sections.items():
        if values.get("fp16"):
            yield (
                f"{path}.fp16: found {values['fp16']!r}; the actor computes in bf16 (actor.megatron.bf16: true) or "
                "fp32; allowed: false, or absent"
            )


def drafter_problems(speculation: SpeculationConfig) -> list[str]:
    """The violated rules within ``speculation``, one line each."""
    lines, ngram, path = [], speculation.ngram, speculation.path
    if ngram.prompt_lookup_min > ngram.prompt_lookup_max:
        lines.append(
            f"speculation.ngram.prompt_lookup_min: found {ngram.prompt_lookup_min}; allowed: at most "
            f"prompt_lookup_max = {ngram.prompt_lookup_max}"
        )
    models = ", ".join(KINDS)
    if speculation.drafter in MODEL_FREE:
        if speculation.draft_sample_method != "greedy":
            lines.append(
                f"speculation.draft_sample_method: found {speculation.draft_sample_method}, but drafter "
                f"{speculation.drafter} has no distribution to draw from; allowed: greedy, or with {models}"
            )
        if path is not None:
            lines.append(
                f"speculation.path: found {path}, but drafter {speculation.drafter} has no model; "
                f"allowed: with {models}"
            )
    elif speculation.enabled:  # otherwise no engine loads the head
        if path is None:
            lines.append(f"speculation.path: not given; drafter {speculation.drafter} needs the folder of its head")
        elif not (path / "config.json").is_file():
            lines.append(f"speculation.path: no config.json in {path}; allowed: the folder of an EAGLE head")
    return lines


def _drafter(config: TltConfig) -> Iterator[str]:
    speculation, drafter = config.speculation, config.drafter
    if drafter is None:
        yield from drafter_problems(speculation)
        return
    if not speculation.enabled:
        yield "speculation.enabled: found false, but a drafter is trained; allowed: true, or drafter=null, spot=null"
    elif speculation.drafter != drafter.kind:
        found = speculation.drafter
        yield f"speculation.drafter: found {found}; allowed where one is trained: drafter.kind, {drafter.kind}"
    if speculation.path is not None:
        yield f"speculation.path: found {speculation.path}; a drafter that is trained starts from drafter.path"
    longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    if drafter.max_tokens_per_micro_batch < longest:
        yield (
            f"drafter.max_tokens_per_micro_batch: found {drafter.max_tokens_per_micro_batch}; allowed: at least "
            f"rollout.max_prompt_tokens + rollout.max_response_tokens = {longest}"
        )


def _buffer(config: TltConfig, model: dict[str, Any]) -> Iterator[str]:
    if config.drafter is None:
        return
    buffer, hidden = config.drafter.buffer, positive(model, "hidden_size")
    if config.run.deterministic and not buffer.disk_bytes:
        yield (
            "drafter.buffer.disk_bytes: found 0; under run.deterministic a resumed run repeats its steps, so the "
            "drafter's data has to be on disk; allowed: above 0, or run.deterministic false"
        )
    if hidden is None:
        return
    key = "disk_bytes" if buffer.disk_bytes else "memory_bytes"
    found = getattr(buffer, key)
    longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    least = config.drafter.entry_bytes(longest, hidden)
    if found < least:
        yield (
            f"drafter.buffer.{key}: found {found}; allowed: at least {least}, for one response of "
            f"rollout.max_prompt_tokens + rollout.max_response_tokens = {longest} tokens"
        )


def _adaptive(config: TltConfig) -> Iterator[str]:
    adaptive = config.speculation.adaptive
    if adaptive is not None and config.run.deterministic and adaptive.tuner != "static":
        yield (
            f"run.deterministic: found true; tuner {adaptive.tuner} of speculation.adaptive uses measured times, and "
            "other drafts lead to other sampled responses; allowed: false, or tuner static"
        )


def _spot(config: TltConfig) -> Iterator[str]:
    spot = config.spot
    if spot is None:
        return
    if config.drafter is None:
        yield "spot: there is no drafter section, so there is no drafter to train; allowed: with drafter"
    if config.run.deterministic:
        yield (
            "run.deterministic: found true; how long spot trains the drafter depends on measured times, and another "
            "drafter leads to other sampled responses; allowed: false, or no spot section"
        )
    if config.drafter is not None and config.drafter.loss.reward_weighting and spot.states_bytes:
        yield (
            f"drafter.loss.reward_weighting: found true with spot.states_bytes = {spot.states_bytes}; spot trains on "
            "responses that have no reward yet; allowed: false, or spot.states_bytes = 0"
        )
    engines = config.launcher.world_size // config.rollout.tensor_parallel_size
    if config.drafter is not None and spot.min_entries is not None and engines > 1:
        # the last engine never waits; it may be any engine, whatever the number of its responses
        responses, steps, waiting = _responses(config), config.drafter.buffer.max_age + 1, engines - 1
        most = steps * responses * waiting // engines
        if spot.min_entries > most:
            yield (
                f"spot.min_entries: found {spot.min_entries}; allowed: at most {most}, the average of {waiting} of "
                f"{engines} engines over drafter.buffer.max_age + 1 = {steps} step(s) "
                f"(trainer.prompts_per_step x algorithm.group_size = {responses} responses in each)"
            )
    if engines < 2:
        yield "spot: there is one engine, which never waits for another; allowed: at least two engines"
    elif spot.min_replicas is not None and spot.min_replicas >= engines:
        yield (
            f"spot.min_replicas: found {spot.min_replicas}; allowed: at most {engines - 1}, as the last of the "
            f"{engines} engines ends the rollout"
        )


def _temperatures(config: TltConfig) -> Iterator[str]:
    values = {"rollout.sampling": config.rollout.sampling.temperature, "evaluation": config.evaluation.temperature}
    values |= {f"evaluation.sets.{i}": each.temperature for i, each in enumerate(config.evaluation.sets)}
    for section, found in values.items():
        if 0 < found < LOWEST_TEMPERATURE:
            allowed = f"at least {LOWEST_TEMPERATURE}" + (", or 0" if section == "rollout.sampling" else "")
            yield f"{section}.temperature: found {found:g}; allowed: {allowed} (vLLM's minimum)"


def _router(config: TltConfig) -> Iterator[str]:
    """Auxiliary losses of a mixture of experts that Megatron-Core would compute over the wrong batches."""
    where, given = "actor.megatron.moe_router_load_balancing_type", config.actor.megatron
    found = given.get("moe_router_load_balancing_type")
    kinds = found if isinstance(found, list) else [found]
    if "global_aux_loss" in kinds:
        yield (
            f"{where}: found {found!r}; a global loss needs micro-batches of equal size and number on all "
            "data-parallel ranks, but responses vary in length; allowed: none, aux_loss, seq_aux_loss, sinkhorn; "
            f"{_CONTINUE_AS_NEW_RUN}"
        )
    if "seq_aux_loss" in kinds and config.actor.packing:
        yield (
            f"{where}: found {found!r} with actor.packing true, where a row of several responses would count as one "
            f"sequence; allowed: aux_loss, or actor.packing false; {_CONTINUE_AS_NEW_RUN}"
        )


def _elastic(config: TltConfig) -> Iterator[str]:
    least = config.elastic.min_devices if config.elastic is not None else None
    if least is not None and least > config.launcher.world_size:
        yield (
            f"elastic.min_devices: found {least}; allowed: at most {config.launcher.world_size}, the processes of "
            "launcher.nnodes x launcher.nproc_per_node"
        )
    if least is not None and not config.launcher.max_restarts:
        yield "launcher.max_restarts: found 0; elastic.min_devices needs restarts; allowed: at least 1"


def check_fields_together(config: TltConfig) -> list[str]:
    """The violated rules between keys, one line each."""
    lines = []
    try:
        model, where = read_model(config)
    except ConfigError as error:
        lines, model, where = str(error).splitlines(), {}, ""
    rules = (
        _layout(config, ModelShape.read(model, where)),
        _model(config, model, where),
        _recipe(config, model),
        _buffer(config, model),
        strict_violations(config, model, where),
    )
    kinds = (
        _micro_batches,
        _precision,
        _drafter,
        _spot,
        _adaptive,
        _temperatures,
        runner_violations,
        algorithm_violations,
        tail_violations,
        schedule_violations,
        stream_violations,
        speeds_violations,
        guard_violations,
        integrity_violations,
        _elastic,
        _router,
        optimizer_violations,
    )
    return [*lines, *chain(*rules, *(rule(config) for rule in kinds))]

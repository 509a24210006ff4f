"""The section ``stream``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from megatron_tlt.config.layouts import Layout
from megatron_tlt.config.section import Section

if TYPE_CHECKING:
    from megatron_tlt.config.schema import TltConfig


class StreamConfig(Section):
    """Replicas whose engines are done train on their responses while other engines decode (RollPacker).

    They accumulate the gradient of ``part`` of their responses at a time, until the rollout is over; the update trains
    on the rest. The gradient is that of the whole batch up to the order of its sums, which depends on time.
    """

    part: Annotated[float, Field(gt=0, le=1)] = 0.05


def stream_violations(config: TltConfig) -> Iterator[str]:
    """One line for each key that streaming contradicts."""
    if config.stream is None:
        return
    megatron = config.actor.megatron
    layout = Layout.read(megatron, config.launcher.world_size)
    if layout.dp < 2:
        yield "stream: found a section; the layout has one replica of the policy; allowed: null, or at least two"
    if config.run.deterministic:
        yield (
            "run.deterministic: found true; with stream the order of the gradient's sums depends on measured times; "
            "allowed: false"
        )
    if config.trainer.mini_batches > 1:
        found = f"found {config.trainer.mini_batches}; stream accumulates one gradient per step"
        yield f"trainer.mini_batches: {found}; allowed: 1"
    if config.algorithm.dynamic_sampling.enabled:
        yield (
            "algorithm.dynamic_sampling.enabled: found true; which problems a step trains on is known after the "
            "rollout; allowed with stream: false"
        )
    if config.algorithm.kl.coefficient:
        found = f"found {config.algorithm.kl.coefficient:g}; stream has no reference on the device"
        yield f"algorithm.kl.coefficient: {found}; allowed: 0"
    if config.schedule is not None:
        yield "stream: found a section beside schedule, whose responses race to the end; allowed: one of them"
    if config.rollout.router_replay != "none":
        found = f"found {config.rollout.router_replay}, which stream does not replay"
        yield f"rollout.router_replay: {found}; allowed: none"
    if layout.ep > 1:
        found = f"found {layout.ep}; replicas that share experts run together"
        yield f"actor.megatron.expert_model_parallel_size: {found}; allowed with stream: 1"
    for key in ("moe_aux_loss_coeff", "moe_z_loss_coeff"):
        if megatron.get(key):
            found = f"found {megatron[key]}; its gradient is scaled by the tokens of the whole batch"
            yield f"actor.megatron.{key}: {found}; allowed with stream: 0"
    for key in ("hidden_dropout", "attention_dropout"):
        if megatron.get(key):
            found = f"found {megatron[key]}; a part would draw other masks than the batch"
            yield f"actor.megatron.{key}: {found}; allowed with stream: 0"
    if config.actor.lora is not None and config.actor.lora.dropout:
        found = f"found {config.actor.lora.dropout:g}; a part would draw other masks than the batch"
        yield f"actor.lora.dropout: {found}; allowed with stream: 0"
    for key in ("overlap_grad_reduce", "overlap_param_gather"):
        if config.actor.ddp.get(key):
            found = "found true; a replica that streams would wait for the others"
            yield f"actor.ddp.{key}: {found}; allowed with stream: false"
    yield from _algorithm(config)


def _algorithm(config: TltConfig) -> Iterator[str]:
    from megatron_tlt.algorithms.registry import is_per_problem

    if is_per_problem(config.algorithm) is False:
        yield (
            f"algorithm.name: found {config.algorithm.name}, whose advantages depend on the whole batch; allowed with "
            "stream: one that is per_problem, such as grpo or rloo"
        )

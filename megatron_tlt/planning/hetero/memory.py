"""Bytes that a task needs on a device, as linear functions of the device's layers."""

from __future__ import annotations

from megatron_tlt.planning.hetero.plan import TaskLayout
from megatron_tlt.planning.hetero.workflow import WEIGHT_BYTES, Task

GRADIENT_BYTES = 4
OPTIMIZER_BYTES = 12
"""fp32 weights and Adam's two moments, sharded over the data-parallel ranks."""
_ACTIVATION = 34.0
"""Bytes per token and hidden unit of the layer being computed (Korthikanti et al., 2205.05198, table 2)."""
_LOGIT_TOKENS, _LOGIT_BYTES = 4096, 6


def embeddings(task: Task, stage: int, stages: int) -> int:
    """Weights of embedding and output layer on a stage; if they are tied, the last of several has a copy."""
    if stages == 1:
        return task.model.embeddings
    return task.model.vocabulary * ((stage == 0) + (stage == stages - 1))


def _per_parameter(task: Task, layout: TaskLayout, frozen: bool) -> float:
    if task.kind != "train" or frozen:
        return WEIGHT_BYTES
    return WEIGHT_BYTES + GRADIENT_BYTES + OPTIMIZER_BYTES / layout.dp


def memory_line(task: Task, layout: TaskLayout, stage: int) -> tuple[float, float]:
    """Bytes on each device of a stage: without layers, and per layer.

    Training recomputes all activations, so a layer keeps its input for each micro-batch in flight. An engine's KV cache
    is not included: see ``kv_room``.
    """
    model, (tp, pp, _) = task.model, layout
    fixed = embeddings(task, stage, pp) * _per_parameter(task, layout, task.drafter) / tp
    each = task.layer * _per_parameter(task, layout, False) / tp
    if task.kind == "generate":
        return fixed + task.concurrent * (model.hidden * _ACTIVATION + 4 * model.vocab) / tp, each
    tokens = max(float(task.micro_batch_tokens), task.prompt + task.longest)
    fixed += tokens * model.hidden * _ACTIVATION / tp
    if stage == pp - 1:
        fixed += min(tokens, _LOGIT_TOKENS) * model.vocab * _LOGIT_BYTES / tp
    if task.kind == "train":
        each += (pp - stage) * tokens * model.hidden * WEIGHT_BYTES / tp
    return fixed, each


def kv_share(task: Task, layout: TaskLayout) -> float:
    """Bytes of KV cache per token on each device of an engine; KV heads are replicated if there are too few."""
    return WEIGHT_BYTES * task.model.cached / min(layout.tp, task.model.groups)

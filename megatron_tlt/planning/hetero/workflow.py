"""What one RL step has to do: tasks, the models they run, and which must wait for which."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from megatron_tlt.config.schema import TltConfig

Kind = Literal["generate", "score", "train"]

WEIGHT_BYTES = 2
"""bf16, in training and in the engines."""


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a transformer, in parameters unless said otherwise."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    layer: float
    """Of one layer."""
    active_layer: float
    """Of one layer that a token passes: less than ``layer`` with experts."""
    embedding: float
    """Of the embedding; the head has as many."""
    kv_bytes: float
    """KV cache of one token, all layers, bytes."""
    frozen_embeddings: bool = False
    """Whether embedding and head are not trained, as a drafter's are not."""

    @property
    def parameters(self) -> float:
        return self.layers * self.layer + 2 * self.embedding

    @classmethod
    def read(cls, name: str, sizes: Any) -> ModelSizes:
        """From an object with the attributes of a Hugging Face config (``models.architecture.sizes_of``)."""
        hidden, heads, kv = sizes.hidden_size, sizes.num_attention_heads, sizes.num_key_value_heads
        width = getattr(sizes, "head_dim", None) or hidden // heads
        experts = getattr(sizes, "num_local_experts", None) or 0
        feed = (
            3.0
            * hidden
            * ((getattr(sizes, "moe_intermediate_size", None) if experts else None) or sizes.intermediate_size)
        )
        attention = hidden * width * (2.0 * heads + 2.0 * kv)
        used = getattr(sizes, "num_experts_per_tok", None) or 1
        return cls(
            name=name,
            layers=sizes.num_hidden_layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv,
            layer=attention + feed * max(1, experts),
            active_layer=attention + feed * (used if experts else 1),
            embedding=float(sizes.vocab_size) * hidden,
            kv_bytes=2.0 * WEIGHT_BYTES * sizes.num_hidden_layers * kv * width,
        )

    def drafter(self) -> ModelSizes:
        """An EAGLE head over this model: one layer and its input's projection; embedding and head are shared."""
        layer = self.active_layer + 2.0 * self.hidden * self.hidden
        kv = self.kv_bytes / self.layers
        return ModelSizes(
            f"{self.name} drafter", 1, self.hidden, self.heads, self.kv_heads, layer, layer, self.embedding, kv, True
        )


@dataclass(frozen=True)
class Task:
    """One box of the step; ``sequences`` of ``prompt`` + ``response`` tokens on average."""

    name: str
    kind: Kind
    model: ModelSizes
    sequences: int
    prompt: float
    response: float
    longest: float
    """Response tokens of the longest sequence: a rollout cannot end before it has."""
    after: tuple[str, ...] = ()
    """Tasks whose results it needs."""
    weights_from: str | None = None
    """The task that trains its weights, which have to reach it in every step."""
    micro_batch_tokens: int = 16384
    updates: int = 1
    """Optimizer steps."""
    scores_first: bool = False
    """Whether a pass for log-probs goes before training."""
    concurrent: int = 256
    """Sequences that an engine decodes at most at a time."""

    @property
    def context(self) -> float:
        return self.prompt + self.response

    @property
    def micro_batches(self) -> int:
        return max(1, round(self.sequences * self.context / self.micro_batch_tokens))

    @property
    def units(self) -> int:
        """What is shared among replicas: responses of a rollout, else micro-batches."""
        return self.sequences if self.kind == "generate" else self.micro_batches


@dataclass(frozen=True)
class Workflow:
    """Tasks in an order that respects ``after``.

    Synchronous: a step ends before the next begins. Asynchronous: every group works on its own newest data all the
    time (one step off), so the busiest one sets the pace.
    """

    tasks: tuple[Task, ...]
    asynchronous: bool = False

    def __post_init__(self) -> None:
        names = [task.name for task in self.tasks]
        if len(set(names)) != len(names):
            raise ValueError(f"two tasks of one name: {names}")
        for index, task in enumerate(self.tasks):
            if unknown := set(task.after) - set(names[:index]):
                raise ValueError(f"{task.name}: after {sorted(unknown)}; allowed are tasks before it: {names[:index]}")
            if task.weights_from is not None and task.weights_from not in names:
                raise ValueError(f"{task.name}: weights_from {task.weights_from!r}; tasks: {names}")

    def index(self, name: str) -> int:
        return next(index for index, task in enumerate(self.tasks) if task.name == name)

    def step_seconds(self, seconds: tuple[float, ...], group_of: tuple[int, ...]) -> float:
        """Of a step, from each task's own; monotone in every one of them.

        Tasks of a group run one after another in the workflow's order, those of different groups side by side.
        """
        return max(self.ends(seconds, group_of))

    def ends(self, seconds: tuple[float, ...], group_of: tuple[int, ...]) -> list[float]:
        """When each task ends; asynchronously, how long its group has been busy by then."""
        free: dict[int, float] = {}
        ends: list[float] = []
        for index, task in enumerate(self.tasks):
            start = free.get(group_of[index], 0.0)
            if not self.asynchronous:
                start = max([start, *(ends[self.index(name)] for name in task.after)])
            ends.append(start + seconds[index])
            free[group_of[index]] = ends[-1]
        return ends


def workflow_of(config: TltConfig, model: ModelSizes, response: float, *, asynchronous: bool = False) -> Workflow:
    """The step of a launch config; prompts are taken to be half of what they may be, a drafter to see every response
    once. Verifiers need no devices, so reward is no task."""
    rollout = Task(
        "rollout",
        "generate",
        model,
        config.trainer.prompts_per_step * config.algorithm.group_size,
        config.rollout.max_prompt_tokens / 2,
        response,
        float(config.rollout.max_response_tokens),
        weights_from="actor",
        micro_batch_tokens=config.actor.max_tokens_per_micro_batch,
        updates=config.trainer.mini_batches,
        concurrent=int(config.rollout.vllm.get("max_num_seqs", 256)),
    )
    tasks = [rollout]
    before: tuple[str, ...] = ("rollout",)
    if config.algorithm.kl_coefficient > 0:
        tasks.append(replace(rollout, name="reference", kind="score", after=before, weights_from=None))
        before = ("rollout", "reference")
    tasks.append(replace(rollout, name="actor", kind="train", after=before, weights_from=None, scores_first=True))
    if config.drafter is not None:
        drafter = replace(rollout, name="drafter", kind="train", model=model.drafter(), after=("rollout",))
        tasks.append(replace(drafter, weights_from=None))
    return Workflow(tuple(tasks), asynchronous)

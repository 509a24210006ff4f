"""The tasks of one RL step, the models they run, and their dependencies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from megatron_tlt.config.schema import TltConfig
from megatron_tlt.planning.model_size import ModelSize

Kind = Literal["generate", "score", "train"]

WEIGHT_BYTES = 2
"""bf16, in training and in the engines."""


@dataclass(frozen=True)
class Task:
    """One box of the step; ``sequences`` of ``prompt`` + ``response`` tokens on average."""

    name: str
    kind: Kind
    model: ModelSize
    sequences: int
    prompt: float
    response: float
    longest: float
    """Response tokens of the longest sequence: a rollout cannot end before this sequence."""
    after: tuple[str, ...] = ()
    """Tasks whose results this task needs."""
    weights_from: str | None = None
    """The task that trains its weights and sends them in every step."""
    micro_batch_tokens: int = 16384
    updates: int = 1
    """Optimizer steps."""
    scores_first: bool = False
    """Whether a forward pass for log-probs precedes training."""
    concurrent: int = 256
    """Maximum number of sequences that an engine decodes at a time."""
    drafter: bool = False
    """Whether it is an EAGLE head over ``model``: embedding and output layer are shared and frozen."""

    @property
    def layers(self) -> int:
        return 1 if self.drafter else self.model.layers

    @property
    def layer(self) -> int:
        """Weights of a layer."""
        return self.model.draft_layer() if self.drafter else self.model.layer

    @property
    def active_layer(self) -> int:
        """Weights of a layer that are multiplied with a token."""
        return self.model.draft_layer() if self.drafter else self.model.active_layer

    @property
    def parameters(self) -> int:
        """Number of weights it needs."""
        return self.layers * self.layer + self.model.embeddings

    @property
    def trained(self) -> int:
        """Number of weights it trains."""
        return self.parameters - (self.model.embeddings if self.drafter else 0)

    @property
    def context(self) -> float:
        return self.prompt + self.response

    @property
    def micro_batches(self) -> int:
        return max(1, round(self.sequences * self.context / self.micro_batch_tokens))

    @property
    def units(self) -> int:
        """Number of units divided among replicas: responses for a rollout, else micro-batches."""
        return self.sequences if self.kind == "generate" else self.micro_batches


@dataclass(frozen=True)
class Workflow:
    """Tasks in an order that respects ``after``.

    Synchronous: a step ends before the next starts. Asynchronous: every group works all the time on its newest data
    (one step off), so the busiest group sets the pace.
    """

    tasks: tuple[Task, ...]
    asynchronous: bool = False

    def index(self, name: str) -> int:
        return next(index for index, task in enumerate(self.tasks) if task.name == name)

    def step_seconds(self, seconds: tuple[float, ...], group_of: tuple[int, ...]) -> float:
        """Seconds of a step from each task's seconds; monotone in each of them.

        Tasks of a group run sequentially in the workflow's order; groups run in parallel.
        """
        return max(self.ends(seconds, group_of))

    def ends(self, seconds: tuple[float, ...], group_of: tuple[int, ...]) -> list[float]:
        """The end time of each task; asynchronously, the time its group has been busy by then."""
        free: dict[int, float] = {}
        ends: list[float] = []
        for index, task in enumerate(self.tasks):
            start = free.get(group_of[index], 0.0)
            if not self.asynchronous:
                start = max([start, *(ends[self.index(name)] for name in task.after)])
            ends.append(start + seconds[index])
            free[group_of[index]] = ends[-1]
        return ends


def workflow_of(config: TltConfig, model: ModelSize, response: float, *, asynchronous: bool = False) -> Workflow:
    """The step of a launch config; reward is not a task, as verifiers need no devices.

    Assumes prompts of half the maximum length, and a drafter that sees every response once."""
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
    if config.algorithm.kl.coefficient > 0:
        tasks.append(replace(rollout, name="reference", kind="score", after=before, weights_from=None))
        before = ("rollout", "reference")
    tasks.append(replace(rollout, name="actor", kind="train", after=before, weights_from=None, scores_first=True))
    if config.drafter is not None:
        drafter = replace(rollout, name="drafter", kind="train", drafter=True, after=("rollout",))
        tasks.append(replace(drafter, weights_from=None))
    return Workflow(tuple(tasks), asynchronous)

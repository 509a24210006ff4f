"""The typed form of a launch config: every key, its default, its bounds.

``actor.megatron``, ``actor.ddp``, ``actor.optimizer`` and ``rollout.vllm`` are passed through to the libraries'
own dataclasses and validated against the installed release in ``config.passthrough``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(gt=0.0, le=1.0)]
NonNegativeFloat = Annotated[float, Field(ge=0.0)]


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values are not coerced from other types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)


class RunConfig(Section):
    """Where the run lives and what makes it reproducible."""

    name: str = Field(default="run", min_length=1, max_length=200)
    dir: Path = Path("runs/run")
    seed: NonNegativeInt = 0
    deterministic: bool = False


class LauncherConfig(Section):
    """How many processes: one per device. ``tlt train`` starts torchrun itself where it is not under it yet."""

    nnodes: PositiveInt = 1
    nproc_per_node: PositiveInt = 1
    threads_per_process: PositiveInt = 1
    collective_timeout_s: PositiveInt = 600

    @property
    def world_size(self) -> int:
        return self.nnodes * self.nproc_per_node


class ArchitectureConfig(Section):
    """A Qwen2 model built from nothing; names follow Hugging Face's Qwen2Config."""

    hidden_size: PositiveInt = 128
    intermediate_size: PositiveInt = 384
    num_hidden_layers: PositiveInt = 4
    num_attention_heads: PositiveInt = 4
    num_key_value_heads: PositiveInt = 2
    max_position_embeddings: PositiveInt = 1024
    rope_theta: Annotated[float, Field(gt=0)] = 10000.0
    rms_norm_eps: Annotated[float, Field(gt=0)] = 1e-6
    initializer_range: Annotated[float, Field(gt=0)] = 0.02
    tie_word_embeddings: bool = True


class TokenizerRecipe(Section):
    """A SentencePiece tokenizer trained on the tasks' own prompts and worked solutions."""

    vocab_size: PositiveInt = 256
    num_problems: PositiveInt = 4000


class SupervisedRecipe(Section):
    """Supervised warm-up on worked solutions.

    ``careless_fraction`` of the problems are shown with a careless guess instead: text that a model learns from is of
    mixed quality, and which kind pays is for reinforcement learning to find out.
    """

    num_steps: PositiveInt = 400
    problems_per_step: PositiveInt = 64
    max_sequence_tokens: PositiveInt = 512
    max_tokens_per_micro_batch: PositiveInt = 4096
    careless_fraction: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    optimizer: dict[str, Any] = Field(default_factory=dict)
    lr_warmup_steps: NonNegativeInt = 20
    min_lr_fraction: Annotated[float, Field(ge=0.0, le=1.0)] = 0.1


class RecipeConfig(Section):
    """How to build the model where no trained one is at hand; the result is cached under a hash of all of this."""

    cache_dir: Path = Path("runs/models")
    seed: NonNegativeInt = 0
    architecture: ArchitectureConfig = ArchitectureConfig()
    tokenizer: TokenizerRecipe = TokenizerRecipe()
    supervised: SupervisedRecipe = SupervisedRecipe()


class ModelConfig(Section):
    """The policy to start from: a Hugging Face folder (``path``) or a recipe that builds one.

    ``architecture`` is a Hugging Face ``config.json`` for checks and plans where the folder is not at hand.
    """

    path: Path | None = None
    architecture: Path | None = None
    recipe: RecipeConfig | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> ModelConfig:
        if (self.path is None and self.architecture is None) == (self.recipe is None):
            raise ValueError("give exactly one of model.path (or model.architecture, for plans) and model.recipe")
        return self


class TaskConfig(Section):
    """One source of problems: a generator by name or a prompt file.

    ``kind: generated`` takes ``name`` (see ``tasks.GENERATORS``) and ``params`` for its generator;
    ``kind: file`` takes ``path`` (JSONL or parquet) and ``verifier``.
    """

    kind: Literal["generated", "file"] = "generated"
    name: str
    weight: Annotated[float, Field(gt=0)] = 1.0
    params: dict[str, Any] = Field(default_factory=dict)
    path: Path | None = None
    held_out_path: Path | None = None
    held_out_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    verifier: str = "math"

    @model_validator(mode="after")
    def _file_has_path(self) -> TaskConfig:
        if self.kind == "file" and self.path is None:
            raise ValueError("a task of kind 'file' needs 'path'")
        if self.kind == "generated" and self.path is not None:
            raise ValueError("a task of kind 'generated' takes no 'path'")
        return self


class RewardConfig(Section):
    """The process pool that verifies responses while decoding goes on."""

    workers: PositiveInt = 1
    timeout_s: Annotated[float, Field(gt=0)] = 10.0


class ActorConfig(Section):
    """The Megatron-Core policy. ``megatron``, ``ddp`` and ``optimizer`` go to the library as they are.

    ``optimizer.optimizer`` is ``adam``, ``sgd`` or the import path of an element-wise ``torch.optim.Optimizer`` class,
    which takes ``optimizer_arguments``. ``packing`` lays sequences one behind another; false pads them to one length.
    """

    transformer_impl: Literal["local", "transformer_engine"] = "transformer_engine"
    megatron: dict[str, Any] = Field(default_factory=dict)
    ddp: dict[str, Any] = Field(default_factory=dict)
    optimizer: dict[str, Any] = Field(default_factory=dict)
    optimizer_arguments: dict[str, Any] = Field(default_factory=dict)
    lr_warmup_steps: NonNegativeInt = 0
    max_tokens_per_micro_batch: PositiveInt = 8192
    packing: bool = True
    log_prob_chunk_tokens: PositiveInt = 4096


class SamplingConfig(Section):
    """How training rollouts are sampled."""

    temperature: NonNegativeFloat = 1.0
    top_p: Fraction = 1.0
    top_k: int = Field(default=-1, ge=-1)


class RolloutConfig(Section):
    """The in-process vLLM engines; ``vllm`` goes to EngineArgs as it is."""

    tensor_parallel_size: PositiveInt = 1
    max_prompt_tokens: PositiveInt = 1024
    max_response_tokens: PositiveInt = 4096
    sampling: SamplingConfig = SamplingConfig()
    vllm: dict[str, Any] = Field(default_factory=dict)


class NgramConfig(Section):
    """vLLM's prompt-lookup drafter: the longest and shortest n-gram it matches."""

    prompt_lookup_min: PositiveInt = 2
    prompt_lookup_max: PositiveInt = 4


class SpeculationConfig(Section):
    """Speculative decoding in rollout; never changes the distribution of the responses.

    ``path`` is the folder of an ``eagle`` or ``eagle3`` head; embedding and output head that it lacks are the policy's.
    """

    enabled: bool = True
    drafter: Literal["ngram", "eagle", "eagle3"] = "ngram"
    path: Path | None = None
    num_speculative_tokens: PositiveInt = 3
    ngram: NgramConfig = NgramConfig()


class DrafterLossConfig(Section):
    """What the drafter learns from.

    ``name`` compares its distribution with the target's: ``eagle`` by cross entropy, ``kl`` by KL divergence, ``tv``
    by total variation, times ``distribution_weight``. ``regression_weight`` times SmoothL1 of EAGLE's hidden states
    comes on top (0.5 with ``eagle``, else 0, unless given; EAGLE-3 has none). ``reward_weighting`` multiplies a
    response's loss by its reward, scaled from ``reward_low .. reward_high`` to 0..1 and at least ``reward_floor``.
    """

    name: Literal["eagle", "kl", "tv"] = "eagle"
    distribution_weight: Annotated[float, Field(gt=0)] = 0.5
    regression_weight: NonNegativeFloat | None = None
    reward_weighting: bool = False
    reward_low: float = 0.0
    reward_high: float = 1.0
    reward_floor: Annotated[float, Field(ge=0.0, le=1.0)] = 0.1

    @model_validator(mode="after")
    def _bounds_in_order(self) -> DrafterLossConfig:
        if self.reward_low >= self.reward_high:
            raise ValueError(f"reward_low is {self.reward_low}; must be below reward_high, {self.reward_high}")
        return self


class DrafterBufferConfig(Section):
    """The online data buffer of one rank.

    What it holds takes at most ``disk_bytes`` in files, of which up to ``memory_bytes`` is in memory too; 0 means
    memory alone, which does not survive the process. Responses are dropped once they are more than ``max_age`` steps
    old. ``earlier_fraction`` of a batch is drawn from earlier steps, with weight proportional to length.
    """

    memory_bytes: PositiveInt = 1 << 30
    disk_bytes: NonNegativeInt = 8 << 30
    max_age: NonNegativeInt = 2
    earlier_fraction: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5


class DrafterConfig(Section):
    """The learned drafter and its training: ``session_steps`` steps in every RL step, each on ``entries_per_step``
    responses per rank.

    ``path`` starts it from a folder, else from the target's last layer. ``unroll_steps`` drafts are trained behind one
    another (3 for EAGLE and 4 for EAGLE-3 unless given), the loss of each further one times ``unroll_decay``.
    ``feature_noise`` is the half-width of uniform noise on the features it reads.
    """

    kind: Literal["eagle", "eagle3"] = "eagle"
    path: Path | None = None
    taps: list[NonNegativeInt] | None = None
    loss: DrafterLossConfig = DrafterLossConfig()
    buffer: DrafterBufferConfig = DrafterBufferConfig()
    optimizer: str = "torch.optim.AdamW"
    optimizer_arguments: dict[str, Any] = Field(default_factory=dict)
    lr: Annotated[float, Field(gt=0)] = 1e-4
    weight_decay: NonNegativeFloat = 0.0
    warmup_steps: NonNegativeInt = 0
    clip_grad: NonNegativeFloat = 1.0
    session_steps: PositiveInt = 20
    entries_per_step: PositiveInt = 16
    max_tokens_per_micro_batch: PositiveInt = 8192
    logit_chunk_tokens: PositiveInt = 1024
    unroll_steps: PositiveInt | None = None
    unroll_decay: Fraction = 0.8
    feature_noise: NonNegativeFloat = 0.0

    @property
    def steps(self) -> int:
        """Drafts trained behind one another."""
        return self.unroll_steps or (3 if self.kind == "eagle" else 4)

    @property
    def regression_weight(self) -> float:
        """The weight of the regression that is in force."""
        default = 0.5 if self.kind == "eagle" and self.loss.name == "eagle" else 0.0
        return default if self.loss.regression_weight is None else self.loss.regression_weight

    @model_validator(mode="after")
    def _kind_has_options(self) -> DrafterConfig:
        if self.kind == "eagle3" and self.loss.regression_weight:
            raise ValueError(f"loss.regression_weight is {self.loss.regression_weight}; EAGLE-3 has none, allowed: 0")
        if self.kind == "eagle" and self.taps is not None:
            raise ValueError("taps are EAGLE-3's; EAGLE takes none")
        return self


class MismatchConfig(Section):
    """What to do about the difference between the rollout's log-probs and the actor's.

    ``fail`` stops the run where the step's mean absolute difference is above ``threshold``; ``correct`` multiplies each
    token's loss by min(exp(actor - rollout), ``truncation``); ``log`` only records it.
    """

    action: Literal["log", "correct", "fail"] = "log"
    threshold: Annotated[float, Field(gt=0)] = 0.1
    truncation: Annotated[float, Field(ge=1.0)] = 2.0


class AlgorithmConfig(Section):
    """Group-relative policy optimization and its choices."""

    name: Literal["grpo"] = "grpo"
    group_size: Annotated[int, Field(ge=2)] = 8
    clip_low: NonNegativeFloat = 0.2
    clip_high: NonNegativeFloat = 0.2
    normalize_by_std: bool = True
    loss_aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    kl_coefficient: NonNegativeFloat = 0.0
    entropy_coefficient: NonNegativeFloat = 0.0
    mismatch: MismatchConfig = MismatchConfig()


class EvaluationConfig(Section):
    """Held-out evaluation: one greedy response and ``samples`` sampled ones per problem."""

    problems: PositiveInt = 200
    samples: PositiveInt = 4
    temperature: Annotated[float, Field(gt=0)] = 1.0
    every: NonNegativeInt = 0
    greedy: bool = True


class TrainerConfig(Section):
    """How long, how much a step, how often a checkpoint. ``save_every`` 0 saves only at the end and when stopped.

    ``async_save`` goes on training while a checkpoint is written.
    """

    steps: PositiveInt = 100
    prompts_per_step: PositiveInt = 32
    mini_batches: PositiveInt = 1
    save_every: NonNegativeInt = 10
    async_save: bool = True
    keep_checkpoints: PositiveInt = 2


class ReshardConfig(Section):
    """How weights go from the actor to the engines; ``verify_every`` 0 switches the checksums off.

    ``direct`` moves to each engine rank the slices that it lacks; ``staging_mb`` (MiB) bounds a rank's buffers.
    ``export`` gathers whole tensors on every rank and lets the engine load them.
    """

    method: Literal["direct", "export"] = "direct"
    staging_mb: Annotated[float, Field(gt=0)] = 256.0
    verify_every: NonNegativeInt = 1


class WandbConfig(Section):
    """Weights & Biases, when asked for."""

    project: str
    entity: str | None = None
    mode: Literal["online", "offline"] = "online"


class ObserveConfig(Section):
    """What is written besides metrics.jsonl, timeline.json, report.html and summary.json."""

    tensorboard: bool = True
    wandb: WandbConfig | None = None
    progress: bool = True


class TltConfig(Section):
    """A whole launch config."""

    run: RunConfig = RunConfig()
    launcher: LauncherConfig = LauncherConfig()
    model: ModelConfig
    tasks: list[TaskConfig] = Field(min_length=1)
    rewards: RewardConfig = RewardConfig()
    actor: ActorConfig = ActorConfig()
    rollout: RolloutConfig = RolloutConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    drafter: DrafterConfig | None = None
    algorithm: AlgorithmConfig = AlgorithmConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    trainer: TrainerConfig = TrainerConfig()
    reshard: ReshardConfig = ReshardConfig()
    observe: ObserveConfig = ObserveConfig()

"""The typed form of a launch config: every key, its default, its bounds.

``actor.megatron``, ``actor.ddp``, ``actor.optimizer`` and ``rollout.vllm`` are passed through to the libraries'
own dataclasses and validated against the installed release in ``config.passthrough``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from megatron_tlt.config.drafter import DrafterConfig
from megatron_tlt.config.section import Fraction, NonNegativeFloat, NonNegativeInt, PositiveInt, Section
from megatron_tlt.config.speculation import SpeculationConfig
from megatron_tlt.config.spot import SpotConfig


class RunConfig(Section):
    """Where the run lives and what makes it reproducible."""

    name: str = Field(default="run", min_length=1, max_length=200)
    dir: Path = Path("runs/run")
    seed: NonNegativeInt = 0
    deterministic: bool = False


class LauncherConfig(Section):
    """How many processes: one per device. ``tlt train`` starts torchrun itself where it is not under it yet.

    Where a signal that nobody sends to stop a run (SIGKILL, SIGSEGV, the kernel's OOM killer) ends a rank, ``tlt
    train`` starts all ranks again from the newest checkpoint, ``max_restarts`` times at most, and not where the same
    step ended so twice in a row. An error with a message, SIGTERM and Ctrl-C never start anything again.
    """

    nnodes: PositiveInt = 1
    nproc_per_node: PositiveInt = 1
    threads_per_process: PositiveInt = 1
    collective_timeout_s: PositiveInt = 600
    max_restarts: Annotated[int, Field(ge=0, le=100)] = 3

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
    """How to build the model that the run starts from; the result is cached under a hash of all of this.

    ``supervised`` trains on the tasks' worked solutions: the Hugging Face folder ``base`` with its own tokenizer or,
    without ``base``, a new model of ``architecture`` with a ``tokenizer`` trained on the tasks.
    """

    cache_dir: Path = Path("runs/models")
    seed: NonNegativeInt = 0
    base: Path | None = None
    architecture: ArchitectureConfig = ArchitectureConfig()
    tokenizer: TokenizerRecipe = TokenizerRecipe()
    supervised: SupervisedRecipe = SupervisedRecipe()

    @model_validator(mode="after")
    def _base_has_both(self) -> RecipeConfig:
        default = RecipeConfig.model_fields
        for name in ("architecture", "tokenizer"):
            if self.base is not None and getattr(self, name) != default[name].default:
                raise ValueError(f"{name} is given, but base has its own; allowed: one of the two")
        return self


class ModelConfig(Section):
    """The policy to start from: a Hugging Face folder (``path``) or a recipe that builds one.

    ``architecture`` is a Hugging Face ``config.json`` for checks and plans where the folder is not at hand.
    ``verify`` compares the weights with their folder's ``manifest.json`` before they are used.
    """

    path: Path | None = None
    verify: bool = True
    architecture: Path | None = None
    recipe: RecipeConfig | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> ModelConfig:
        if (self.path is None and self.architecture is None) == (self.recipe is None):
            raise ValueError("give exactly one of model.path (or model.architecture, for plans) and model.recipe")
        return self


_OWN_VERIFIER = {"file": "math", "python": "math"}
"""Of the kinds of tasks whose problems are not reasoning-gym's."""


class TaskConfig(Section):
    """One source of problems: a generator, a dataset of reasoning-gym, a prompt file, or a function by import path.

    ``verifier`` is a name of ``rewards.VERIFIERS`` or the import path of a function (``rewards/functions.py``); its
    default is the generator's or dataset's own, and ``math`` for other kinds.

    ``kind: generated`` takes ``name`` (see ``tasks.GENERATORS``) and ``params`` for its generator: short prompts with
    worked solutions; ``kind: reasoning_gym`` takes the ``name`` of any dataset of that library and ``params`` for its
    config, and rewards with its score; ``kind: file`` takes ``path`` (JSONL or parquet);
    ``kind: python`` takes as ``name`` the import path of a function or class that draws problems, and its ``params``
    (``tasks/python_task.py``).

    ``chat`` puts plain prompts through the model's chat template, after ``system_prompt``. ``answer_format`` says where
    the verifier looks for the answer (the last ``<answer>`` tag, the last box, the last line) and adds a sentence that
    asks for it, in whose place ``instruction`` stands where it is given.
    """

    kind: Literal["generated", "reasoning_gym", "file", "python"] = "generated"
    name: str
    weight: Annotated[float, Field(gt=0)] = 1.0
    params: dict[str, Any] = Field(default_factory=dict)
    path: Path | None = None
    held_out_path: Path | None = None
    held_out_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    verifier: str = Field(default_factory=lambda known: _OWN_VERIFIER.get(known.get("kind"), "reasoning_gym"))
    chat: bool = False
    system_prompt: str | None = None
    instruction: str | None = None
    answer_format: Literal["answer_tag", "boxed", "last_line"] | None = None

    @model_validator(mode="after")
    def _kind_has_options(self) -> TaskConfig:
        if self.kind == "file" and self.path is None:
            raise ValueError("a task of kind 'file' needs 'path'")
        if self.kind != "file" and self.path is not None:
            raise ValueError(f"a task of kind '{self.kind}' takes no 'path'")
        if self.kind == "reasoning_gym" and self.answer_format is None:
            raise ValueError("a task of kind 'reasoning_gym' needs 'answer_format': answer_tag, boxed or last_line")
        if self.kind == "generated" and (self.answer_format or self.instruction):
            raise ValueError("a task of kind 'generated' asks for its answer itself; no answer_format or instruction")
        if self.kind != "file" and self.system_prompt is not None and not self.chat:
            raise ValueError("system_prompt is a chat message; it needs 'chat: true'")
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
    """The engines that generate; ``vllm`` goes to vLLM's EngineArgs as it is.

    ``engine`` is one of ``rollout.engines.ENGINES`` or the import path of a subclass of ``rollout.interface``'s
    ``RolloutEngine``, which takes ``engine_arguments``. A prompt above ``max_prompt_tokens`` is an error, or left out
    and counted where ``filter_overlong_prompts`` is true.
    """

    engine: str = "vllm"
    engine_arguments: dict[str, Any] = Field(default_factory=dict)
    tensor_parallel_size: PositiveInt = 1
    max_prompt_tokens: PositiveInt = 1024
    filter_overlong_prompts: bool = False
    max_response_tokens: PositiveInt = 4096
    sampling: SamplingConfig = SamplingConfig()
    # null takes back what a parent file gives
    vllm: Annotated[dict[str, Any], BeforeValidator(lambda found: {} if found is None else found)] = Field(
        default_factory=dict
    )

    @property
    def max_num_seqs(self) -> int | None:
        """Requests that an engine decodes at once at most; None where the config leaves it to the engine."""
        found = self.vllm.get("max_num_seqs")
        return None if found is None else int(found)

    @property
    def dtype(self) -> str | None:
        """The engine's dtype by its name; None where the config leaves it to the engine."""
        found = self.vllm.get("dtype")
        return None if found is None else str(found)

    @property
    def expert_parallel(self) -> bool:
        """Whether an engine's ranks hold whole experts, and not a part of each."""
        return bool(self.vllm.get("enable_expert_parallel"))


class MismatchConfig(Section):
    """What to do about the difference between the rollout's log-probs and the actor's.

    ``fail`` stops the run where the step's mean absolute difference is above ``threshold``; ``correct`` multiplies each
    token's loss by min(exp(actor - rollout), ``truncation``); ``log`` only records it.
    """

    action: Literal["log", "correct", "fail"] = "log"
    threshold: Annotated[float, Field(gt=0)] = 0.1
    truncation: Annotated[float, Field(ge=1.0)] = 2.0


class AlgorithmConfig(Section):
    """How responses are rewarded and what an update minimizes.

    ``name`` is one of ``algorithms.registry.ALGORITHMS`` or the import path of a subclass of ``algorithms.algorithm``'s
    ``Algorithm``, which takes ``arguments``. ``normalize_by_std`` is true, but for ``dr_grpo``.
    """

    name: str = "grpo"
    arguments: dict[str, Any] = Field(default_factory=dict)
    group_size: Annotated[int, Field(ge=2)] = 8
    clip_low: NonNegativeFloat = 0.2
    clip_high: NonNegativeFloat = 0.2
    normalize_by_std: bool = Field(default_factory=lambda known: known.get("name") != "dr_grpo")
    loss_aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    kl_coefficient: NonNegativeFloat = 0.0
    entropy_coefficient: NonNegativeFloat = 0.0
    mismatch: MismatchConfig = MismatchConfig()


class EvaluationConfig(Section):
    """Held-out evaluation: one greedy response and ``samples`` sampled ones per problem.

    ``top_p`` and ``top_k`` of the sampled ones are ``rollout.sampling``'s where they are not given.
    """

    problems: PositiveInt = 200
    samples: PositiveInt = 4
    temperature: Annotated[float, Field(gt=0)] = 1.0
    top_p: Fraction | None = None
    top_k: int | None = Field(default=None, ge=-1)
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
    ``none`` moves and verifies nothing; it is for engines that take no weights.
    """

    method: Literal["direct", "none"] = "direct"
    staging_mb: Annotated[float, Field(gt=0)] = 256.0
    verify_every: NonNegativeInt = 1


class WandbConfig(Section):
    """Weights & Biases, when asked for."""

    project: str
    entity: str | None = None
    mode: Literal["online", "offline"] = "online"


class ObserveConfig(Section):
    """What is written besides metrics.jsonl, timeline.json, report.html and summary.json.

    ``samples_per_task`` responses of each task, step and evaluation at most go into samples.jsonl as text (0: none); a
    text that is longer than ``sample_characters`` loses its middle.
    """

    tensorboard: bool = True
    wandb: WandbConfig | None = None
    progress: bool = True
    samples_per_task: NonNegativeInt = 3
    sample_characters: PositiveInt = 8000


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
    spot: SpotConfig | None = None
    algorithm: AlgorithmConfig = AlgorithmConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    trainer: TrainerConfig = TrainerConfig()
    reshard: ReshardConfig = ReshardConfig()
    observe: ObserveConfig = ObserveConfig()

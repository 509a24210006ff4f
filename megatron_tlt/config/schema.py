"""The schema of a launch config: every key with its default and bounds.

``actor.megatron``, ``actor.ddp``, ``actor.optimizer`` and ``rollout.vllm`` are passed through to the libraries'
own dataclasses and validated against the installed release in ``config.passthrough``.
"""

from __future__ import annotations

import os
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, model_validator

from megatron_tlt.config.algorithm import AlgorithmConfig
from megatron_tlt.config.drafter import DrafterConfig
from megatron_tlt.config.section import Fraction, NonNegativeFloat, NonNegativeInt, PositiveInt, Section
from megatron_tlt.config.speculation import SpeculationConfig
from megatron_tlt.config.spot import SpotConfig


class RunConfig(Section):
    """Location and reproducibility of the run."""

    name: str = Field(default="run", min_length=1, max_length=200)
    dir: Path = Path("runs/run")
    seed: NonNegativeInt = 0
    deterministic: bool = False


def _processes(value: Any) -> Any:
    if value != "auto":
        return value
    gpus = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:  # CUDA, too, stops at the first entry that is no device
        gpus = min(gpus, len(list(takewhile(lambda name: name[:1] not in ("", "-"), visible.split(",")))))
    return gpus or 2


Phase = Literal["start", "rollout", "log-probs", "update", "drafter", "reshard", "evaluate", "checkpoint", "export"]
PHASES: tuple[Phase, ...] = get_args(Phase)
"""What a rank does one after another, from its start to the export of the trained model."""


class LauncherConfig(Section):
    """Number of processes, one per device. ``tlt train`` starts torchrun itself if it does not run under it.

    If a rank is killed by a signal other than a request to stop (SIGKILL, SIGSEGV, the kernel's OOM killer), ``tlt
    train`` restarts all ranks from the newest checkpoint, at most ``max_restarts`` times. It does not restart if the
    same step failed twice in a row, or after an error with a message, SIGTERM or Ctrl-C.

    A phase of a step that takes longer than ``phase_timeout_s`` ends the run (null: never), with the ranks that stand
    still and every thread's stack in ``logs/``. ``phase_timeouts_s`` has other limits by phase: start, rollout,
    log-probs, update, drafter, reshard, evaluate, checkpoint, export.

    ``nproc_per_node: auto`` is one process for each GPU of this machine, and two on a machine without GPUs.
    """

    nnodes: PositiveInt = 1
    nproc_per_node: Annotated[PositiveInt, BeforeValidator(_processes)] = 1
    threads_per_process: PositiveInt = 1
    collective_timeout_s: PositiveInt = 600
    phase_timeout_s: PositiveInt | None = 4 * 3600
    phase_timeouts_s: dict[Phase, PositiveInt] = Field(default_factory=dict)
    max_restarts: Annotated[int, Field(ge=0, le=100)] = 3

    @property
    def world_size(self) -> int:
        return self.nnodes * self.nproc_per_node

    @property
    def phase_limits_s(self) -> dict[str, float]:
        """Seconds by phase; a phase without a limit is not in it."""
        limits = {phase: self.phase_timeouts_s.get(phase, self.phase_timeout_s) for phase in PHASES}
        return {phase: float(limit) for phase, limit in limits.items() if limit is not None}


class ArchitectureConfig(Section):
    """A randomly initialized Qwen2 model; names follow Hugging Face's Qwen2Config."""

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
    """A SentencePiece tokenizer trained on the tasks' prompts and worked solutions."""

    vocab_size: PositiveInt = 256
    num_problems: PositiveInt = 4000


class SupervisedRecipe(Section):
    """Supervised warm-up on worked solutions.

    A fraction ``careless_fraction`` of the problems has a careless guess instead of a solution. This imitates training
    text of mixed quality; reinforcement learning then discovers which kind is rewarded.
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
    """How to build the initial model of a run; the result is cached under a hash of this section.

    ``supervised`` trains on the tasks' worked solutions. It starts from the Hugging Face folder ``base`` with its own
    tokenizer or, without ``base``, from a new model of ``architecture`` with a ``tokenizer`` trained on the tasks.
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
    """The initial policy: a Hugging Face folder (``path``) or a recipe that builds one.

    ``architecture`` is a Hugging Face ``config.json`` for checks and plans without the model folder. ``verify``
    compares the weights with their folder's ``manifest.json`` before they are used.
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
"""Default verifier of tasks whose problems do not come from reasoning-gym."""


class TaskConfig(Section):
    """One source of problems: a generator, a dataset of reasoning-gym, a prompt file, or a function by import path.

    ``verifier`` is a name of ``rewards.VERIFIERS`` or the import path of a function (``rewards/functions.py``); its
    default is the generator's or dataset's own, and ``math`` for other kinds.

    ``kind: generated`` takes ``name`` (see ``tasks.GENERATORS``) and ``params`` for its generator: short prompts with
    worked solutions; ``kind: reasoning_gym`` takes the ``name`` of any dataset of that library and ``params`` for its
    config, and rewards with its score; ``kind: file`` takes ``path`` (JSONL or parquet);
    ``kind: python`` takes as ``name`` the import path of a function or class that draws problems, and its ``params``
    (``tasks/python_task.py``).

    ``chat`` applies the model's chat template to plain prompts, after ``system_prompt``. ``answer_format`` selects the
    place of the answer for the verifier (the last ``<answer>`` tag, the last box, the last line) and adds a sentence
    that requests this format; ``instruction`` replaces that sentence.
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
            raise ValueError("a task of kind 'generated' has its own answer format; no answer_format or instruction")
        if self.kind != "file" and self.system_prompt is not None and not self.chat:
            raise ValueError("system_prompt is a chat message; it needs 'chat: true'")
        return self


class RewardConfig(Section):
    """The process pool that verifies responses during decoding."""

    workers: PositiveInt = 1
    timeout_s: Annotated[float, Field(gt=0)] = 10.0


class ActorConfig(Section):
    """The Megatron-Core policy. ``megatron``, ``ddp`` and ``optimizer`` are passed to the library unchanged.

    ``optimizer.optimizer`` is ``adam``, ``sgd`` or the import path of an element-wise ``torch.optim.Optimizer`` class,
    which takes ``optimizer_arguments``. ``packing`` concatenates sequences; false pads them to equal length.
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
    """Sampling parameters of training rollouts."""

    temperature: NonNegativeFloat = 1.0
    top_p: Fraction = 1.0
    top_k: int = Field(default=-1, ge=-1)


class RolloutConfig(Section):
    """The rollout engines; ``vllm`` is passed to vLLM's EngineArgs unchanged.

    ``engine`` is one of ``rollout.engines.ENGINES`` or the import path of a subclass of ``rollout.interface``'s
    ``RolloutEngine``, which takes ``engine_arguments``. A prompt longer than ``max_prompt_tokens`` is an error; with
    ``filter_overlong_prompts`` it is skipped and counted instead.
    """

    engine: str = "vllm"
    engine_arguments: dict[str, Any] = Field(default_factory=dict)
    tensor_parallel_size: PositiveInt = 1
    max_prompt_tokens: PositiveInt = 1024
    filter_overlong_prompts: bool = False
    max_response_tokens: PositiveInt = 4096
    sampling: SamplingConfig = SamplingConfig()
    # null resets the value of a parent file
    vllm: Annotated[dict[str, Any], BeforeValidator(lambda found: {} if found is None else found)] = Field(
        default_factory=dict
    )

    @property
    def max_num_seqs(self) -> int | None:
        """Maximum number of concurrent requests of an engine; None if the config leaves it to the engine."""
        found = self.vllm.get("max_num_seqs")
        return None if found is None else int(found)

    @property
    def dtype(self) -> str | None:
        """The name of the engine's dtype; None if the config leaves it to the engine."""
        found = self.vllm.get("dtype")
        return None if found is None else str(found)

    @property
    def expert_parallel(self) -> bool:
        """Whether each expert is on one rank of an engine, instead of sharded over its ranks."""
        return bool(self.vllm.get("enable_expert_parallel"))


class EvaluationConfig(Section):
    """Held-out evaluation: one greedy response and ``samples`` sampled responses per problem.

    ``top_p`` and ``top_k`` of the sampled responses default to those of ``rollout.sampling``.
    """

    problems: PositiveInt = 200
    samples: PositiveInt = 4
    temperature: Annotated[float, Field(gt=0)] = 1.0
    top_p: Fraction | None = None
    top_k: int | None = Field(default=None, ge=-1)
    every: NonNegativeInt = 0
    greedy: bool = True


class TrainerConfig(Section):
    """Number of steps, step size and checkpoint interval. ``save_every`` 0 saves only at the end and when stopped.

    ``async_save`` writes checkpoints in the background while training continues.
    """

    steps: PositiveInt = 100
    prompts_per_step: PositiveInt = 32
    mini_batches: PositiveInt = 1
    save_every: NonNegativeInt = 10
    async_save: bool = True
    keep_checkpoints: PositiveInt = 2


class ReshardConfig(Section):
    """Transfer of weights from the actor to the engines; ``verify_every`` 0 disables the checksums.

    ``direct`` sends to each engine rank the slices that it lacks; ``staging_mb`` (MiB) bounds a rank's buffers.
    ``none`` transfers and verifies nothing; it is for engines that take no weights.
    """

    method: Literal["direct", "none"] = "direct"
    staging_mb: Annotated[float, Field(gt=0)] = 256.0
    verify_every: NonNegativeInt = 1


class WandbConfig(Section):
    """Weights & Biases logging (optional)."""

    project: str
    entity: str | None = None
    mode: Literal["online", "offline"] = "online"


class ObserveConfig(Section):
    """Output in addition to metrics.jsonl, timeline.json, report.html and summary.json.

    At most ``samples_per_task`` responses per task, step and evaluation are written to samples.jsonl as text (0: none);
    the middle of a text longer than ``sample_characters`` is cut out. ``recording`` writes all training responses, as
    tokens with log-probs, into the run's folder ``recording``, from which ``rollout.engine: replay`` trains.
    """

    tensorboard: bool = True
    wandb: WandbConfig | None = None
    progress: bool = True
    samples_per_task: NonNegativeInt = 3
    sample_characters: PositiveInt = 8000
    recording: bool = False


class TltConfig(Section):
    """A complete launch config."""

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

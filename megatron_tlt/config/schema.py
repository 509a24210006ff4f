"""The schema of a launch config: every key with its default and bounds.

``actor.megatron``, ``actor.ddp``, ``actor.optimizer`` and ``rollout.vllm`` are passed through to the libraries'
own dataclasses and validated against the installed release in ``config.passthrough``.
"""

from __future__ import annotations

import os
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from megatron_tlt.config.algorithm import AlgorithmConfig
from megatron_tlt.config.drafter import DrafterConfig
from megatron_tlt.config.elastic import ElasticConfig
from megatron_tlt.config.evaluation import EvaluationConfig
from megatron_tlt.config.guard import GuardConfig
from megatron_tlt.config.integrity import IntegrityConfig
from megatron_tlt.config.lora import LoraConfig
from megatron_tlt.config.optimizer import LrScheduleConfig, OptimizerSplitConfig
from megatron_tlt.config.phases import Phase, limits_of_phases, nccl_timeout
from megatron_tlt.config.reward import RewardConfig
from megatron_tlt.config.schedule import OptionalSchedule
from megatron_tlt.config.section import Fraction, NonNegativeFloat, NonNegativeInt, PositiveInt, Section
from megatron_tlt.config.speculation import SpeculationConfig
from megatron_tlt.config.speeds import SpeedsConfig
from megatron_tlt.config.spot import SpotConfig
from megatron_tlt.config.stream import StreamConfig
from megatron_tlt.config.tail import TailConfig
from megatron_tlt.config.task import CurriculumConfig, TaskConfig


class RunConfig(Section):
    """Location and reproducibility of the run."""

    name: str = Field(default="run", min_length=1, max_length=200)
    dir: Path = Path("runs/run")
    seed: NonNegativeInt = 0
    deterministic: bool = False


def visible_gpus() -> int:
    """Number of this machine's NVIDIA GPUs that CUDA would show; needs neither torch nor a driver call."""
    gpus = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:  # CUDA, too, stops at the first entry that is no device
        gpus = min(gpus, len(list(takewhile(lambda name: name[:1] not in ("", "-"), visible.split(",")))))
    return gpus


def _processes(value: Any) -> Any:
    return value if value != "auto" else visible_gpus() or 2


class LauncherConfig(Section):
    """Number of processes, one per device. ``tlt train`` starts torchrun itself if it does not run under it.

    If a rank is killed by a signal other than a request to stop (SIGKILL, SIGSEGV, the kernel's OOM killer), ``tlt
    train`` restarts all ranks from the newest checkpoint, at most ``max_restarts`` times. It does not restart if the
    same step failed twice in a row, or after an error with a message, SIGTERM or Ctrl-C.

    A phase of a step that takes longer than ``phase_timeout_s`` ends the run (null: never), with the ranks that stand
    still and every thread's stack in ``logs/``. ``phase_timeouts_s`` has other limits by phase (``config/phases.py``).
    ``collective_timeout_s`` limits a collective on the host (gloo); one of NCCL may take as long as its phase.
    """

    nnodes: PositiveInt = 1
    nproc_per_node: Annotated[PositiveInt, BeforeValidator(_processes)] = 1
    threads_per_process: PositiveInt = 1
    collective_timeout_s: PositiveInt = 600
    phase_timeout_s: PositiveInt | None = 4 * 3600
    phase_timeouts_s: dict[Phase, PositiveInt] = Field(default_factory=dict)
    max_restarts: Annotated[int, Field(ge=0, le=100)] = 3
    preload: bool | None = None

    @property
    def preloads(self) -> bool:
        """Whether ranks are forks of a process that has imported what they need: by default without GPUs only."""
        return not visible_gpus() if self.preload is None else self.preload

    @property
    def world_size(self) -> int:
        return self.nnodes * self.nproc_per_node

    @property
    def phase_limits_s(self) -> dict[str, float]:
        """Seconds by phase, infinite for a phase without a limit."""
        return limits_of_phases(self.phase_timeout_s, self.phase_timeouts_s)

    @property
    def timeouts_s(self) -> tuple[int, int]:
        """Seconds for a collective on the host, and for one of NCCL: after the limits of all phases."""
        return self.collective_timeout_s, nccl_timeout(self.collective_timeout_s, self.phase_limits_s.values())


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
    """Supervised warm-up on the conversations in the files ``data`` or, without them, on the tasks' worked solutions.

    A row of ``data`` (JSONL, parquet) has chat ``messages``, or ``prompt`` and ``completion``. All messages of the
    assistant are trained on, as the chat template of the recipe's ``base`` formats them. Each epoch has another order.

    A fraction ``careless_fraction`` of the problems has a careless guess instead of a solution. This imitates training
    text of mixed quality; reinforcement learning then discovers which kind is rewarded.
    """

    data: tuple[Path, ...] = ()
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

    ``supervised`` trains on the tasks' worked solutions or on conversations. It starts from the Hugging Face folder
    ``base`` with its own tokenizer or, without ``base``, from a new model of ``architecture`` with a ``tokenizer``
    trained on the tasks.
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

    @model_validator(mode="after")
    def _conversations_have_a_template(self) -> RecipeConfig:
        if self.supervised.data and self.base is None:
            raise ValueError(
                "supervised.data is given without base; allowed: with a base, whose chat template formats conversations"
            )
        if self.supervised.data and self.supervised.careless_fraction:
            raise ValueError("supervised.careless_fraction concerns worked solutions; allowed: 0 with supervised.data")
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


class ActorConfig(Section):
    """The Megatron-Core policy. ``megatron``, ``ddp`` and ``optimizer`` are passed to the library unchanged.

    ``optimizer.optimizer`` is ``adam``, ``sgd`` or the import path of a ``torch.optim.Optimizer`` class, which takes
    ``optimizer_arguments``. ``optimizer_sharding`` is what its ranks own: ``element`` slices of all parameters (the
    distributed optimizer), ``tensor`` whole Hugging Face tensors, ``coupled`` one rank all of them; ``auto`` is the
    first of these on which the class steps as it does on all tensors together. ``optimizer_split`` gives another class
    to embedding, LM head, norms and biases. A class whose step takes the loss gets ``optimizer_loss``.

    ``packing`` concatenates sequences; false pads them to equal length. With ``lora`` the update trains low-rank
    adapters, and all other weights are frozen.
    """

    transformer_impl: Literal["local", "transformer_engine"] = "transformer_engine"
    megatron: dict[str, Any] = Field(default_factory=dict)
    ddp: dict[str, Any] = Field(default_factory=dict)
    optimizer: dict[str, Any] = Field(default_factory=dict)
    optimizer_arguments: dict[str, Any] = Field(default_factory=dict)
    optimizer_sharding: Literal["auto", "element", "tensor", "coupled"] = "auto"
    optimizer_split: OptimizerSplitConfig | None = None
    optimizer_loss: Literal["policy", "one_minus_reward"] = "policy"
    lr_warmup_steps: NonNegativeInt = 0
    lr_schedule: LrScheduleConfig = LrScheduleConfig()
    max_tokens_per_micro_batch: PositiveInt = 8192
    packing: bool = True
    log_prob_chunk_tokens: PositiveInt = 4096
    lora: LoraConfig | None = None

    @model_validator(mode="after")
    def _layers_take_adapters(self) -> ActorConfig:
        if self.lora is not None and self.transformer_impl != "local":
            raise ValueError(f"lora: transformer_impl is {self.transformer_impl}; allowed with adapters: local")
        return self

    @property
    def tensor_parallel_size(self) -> int:
        """Number of ranks that share each layer's weights."""
        return int(self.megatron.get("tensor_model_parallel_size", 1))


class SamplingConfig(Section):
    """Sampling parameters of training rollouts."""

    temperature: NonNegativeFloat = 1.0
    top_p: Fraction = 1.0
    top_k: int = Field(default=-1, ge=-1)


GRAPH_ARGS = frozenset({"enforce_eager", "compilation_config", "cudagraph_capture_sizes"})
"""Keys of ``rollout.vllm`` that replace this package's choice of CUDA graphs."""


class RolloutConfig(Section):
    """The rollout engines; ``vllm`` is passed to vLLM's EngineArgs unchanged.

    ``engine`` is one of ``rollout.engines.ENGINES`` or the import path of a subclass of ``rollout.interface``'s
    ``RolloutEngine``, which takes ``engine_arguments``. A prompt longer than ``max_prompt_tokens`` is an error; with
    ``filter_overlong_prompts`` it is skipped and counted instead.

    ``random_numbers`` makes a request's tokens reproducible from its seed. ``generator`` is vLLM's way, a generator for
    each request, which costs a GPU one to three kernels per request and step. ``counter`` computes a number per token
    from seed and position, for all requests at once. ``auto`` is ``counter`` on GPUs and ``generator`` on CPUs.

    ``cuda_graphs`` is the kind of the engine's graphs. ``auto`` captures full graphs, which serve every strategy, where
    the attention backend allows it for any batch (FlashAttention 3), and piecewise graphs elsewhere.

    ``model_runner`` is the generation of vLLM's model runner; ``v2`` is vLLM's own default. Under strategies without
    the drafter model, it skips tokens on ``v1`` and computes them later; on ``v2`` it reads along.

    ``async_scheduling`` schedules a step before the tokens of the step before are known, as vLLM does by default: the
    device does not wait for Python. On ``v2``, without speculation or with a drafter model alone.

    ``router_replay: ids`` lets the actor's routers take the experts that the engine chose for each token;
    ``ids_and_weights`` also how much each of them counts.
    """

    engine: str = "vllm"
    engine_arguments: dict[str, Any] = Field(default_factory=dict)
    tensor_parallel_size: PositiveInt = 1
    max_prompt_tokens: PositiveInt = 1024
    filter_overlong_prompts: bool = False
    max_response_tokens: PositiveInt = 4096
    sampling: SamplingConfig = SamplingConfig()
    random_numbers: Literal["auto", "generator", "counter"] = "auto"
    cuda_graphs: Literal["auto", "full", "piecewise"] = "auto"
    model_runner: Literal["v1", "v2"] = "v1"
    async_scheduling: bool = False
    router_replay: Literal["none", "ids", "ids_and_weights"] = "none"
    # null resets the value of a parent file
    vllm: Annotated[dict[str, Any], BeforeValidator(lambda found: {} if found is None else found)] = Field(
        default_factory=dict
    )

    @model_validator(mode="after")
    def _one_says_the_graphs(self) -> RolloutConfig:
        if self.cuda_graphs != "auto" and (own := sorted(GRAPH_ARGS & set(self.vllm))):
            raise ValueError(f"cuda_graphs is {self.cuda_graphs}, but vllm has {', '.join(own)}; allowed: one of them")
        return self

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


class TrainerConfig(Section):
    """Number of steps, step size and checkpoint interval. ``save_every`` 0 saves only at the end and when stopped.

    ``async_save`` writes checkpoints in the background while training continues. ``curriculum`` draws tasks of medium
    difficulty most.
    """

    steps: PositiveInt = 100
    prompts_per_step: PositiveInt = 32
    mini_batches: PositiveInt = 1
    save_every: NonNegativeInt = 10
    async_save: bool = True
    keep_checkpoints: PositiveInt = 2
    curriculum: CurriculumConfig | None = None

    @property
    def updates(self) -> int:
        """Optimizer steps of the whole run."""
        return self.steps * self.mini_batches


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
    ``aliases`` writes metrics also under the names of other libraries (``observe/metric_table.py``).
    """

    tensorboard: bool = True
    wandb: WandbConfig | None = None
    progress: bool = True
    samples_per_task: NonNegativeInt = 3
    sample_characters: PositiveInt = 8000
    recording: bool = False
    aliases: list[Literal["verl", "slime", "trl"]] = Field(default_factory=list)


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
    tail: TailConfig | None = None
    schedule: OptionalSchedule = None
    stream: StreamConfig | None = None
    speeds: SpeedsConfig | None = None
    elastic: ElasticConfig | None = None
    algorithm: AlgorithmConfig = AlgorithmConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    trainer: TrainerConfig = TrainerConfig()
    guard: GuardConfig | None = None
    reshard: ReshardConfig = ReshardConfig()
    integrity: IntegrityConfig = IntegrityConfig()
    observe: ObserveConfig = ObserveConfig()

    @property
    def all_tasks(self) -> list[TaskConfig]:
        """The tasks of training, then those of the evaluation's data sets."""
        return [*self.tasks, *(task for each in self.evaluation.sets for task in each.tasks)]

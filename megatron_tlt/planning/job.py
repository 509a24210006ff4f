"""A launch config as plain numbers for the memory and time models; pure."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_tlt.config.drafter_kinds import kind_of
from megatron_tlt.config.layouts import Layout
from megatron_tlt.config.lora import LoraConfig
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.config.strict import logical_shards
from megatron_tlt.models.architecture import sizes_of
from megatron_tlt.models.lora_weights import PROJECTIONS
from megatron_tlt.planning.devices import runs_on_gpu
from megatron_tlt.planning.model_size import ModelSize
from megatron_tlt.planning.optimizer_state import OptimizerMemory, optimizer_memory

_WIDE = ("float32", "float")
# vLLM's defaults for unset keys of rollout.vllm (EngineArgs and CacheConfig of release 0.32).
_UTILIZATION, _SEQUENCES, _BATCHED_TOKENS, _BLOCK = 0.9, 256, 8192, 16


@dataclass(frozen=True)
class Recompute:
    """``recompute_*`` of Megatron's TransformerConfig; without a granularity every activation is kept."""

    granularity: str | None = None
    method: str = "uniform"
    layers: int = 1
    modules: tuple[str, ...] = ("core_attn",)

    def __str__(self) -> str:
        return self.granularity or "none"

    def described(self) -> str:
        """With the modules, if it is selective."""
        return " ".join([str(self), *(self.modules if self.granularity == "selective" else ())])


@dataclass(frozen=True)
class ActorJob:
    """Training settings of the actor."""

    layout: Layout
    bf16: bool
    fused: bool
    """Whether norms and attention are Transformer Engine's."""
    recompute: Recompute
    max_tokens: int
    """Tokens of a micro-batch."""
    chunk_tokens: int
    """Tokens per chunk of logits."""
    optimizer: OptimizerMemory
    gradient_bytes: int
    fused_activation: bool = False
    overlap: bool = False
    """Whether the traffic of data parallelism overlaps compute."""
    trained: float = 1.0
    """Weights with gradients and optimizer state, as a share of the model's; with LoRA they come on top of these."""
    largest_tensor: int = 0
    """Weights of the largest Hugging Face tensor that is trained."""
    largest_stepped: int = 0
    """As above, of those that ``actor.optimizer`` steps, without those of a split."""
    logical_shards: int | None = None
    """Parts of a batch whose gradients are summed in one tree (``elastic.strict``)."""

    @property
    def itemsize(self) -> int:
        return 2 if self.bf16 else 4

    @property
    def shards_of_rank(self) -> int:
        """Parts of a data-parallel rank's batch that pass through the pipeline by themselves."""
        return 1 if self.logical_shards is None else max(1, self.logical_shards // self.layout.dp)


@dataclass(frozen=True)
class EngineJob:
    """Decoding settings of vLLM."""

    tp: int
    spread_experts: bool
    itemsize: int
    cache_itemsize: int
    utilization: float
    max_sequences: int
    batched_tokens: int
    cache_tokens: int | None = None
    """Tokens that the KV cache holds, if the config sets it."""


@dataclass(frozen=True)
class DrafterJob:
    """Training settings of the drafter, replicated on each rank."""

    eagle3: bool
    num_aux_layers: int
    steps: int
    """Number of successive drafts that are trained."""
    max_tokens: int
    chunk_tokens: int
    entries_per_step: int
    session_steps: int
    moments: int = 2
    """Tensors that its optimizer keeps per parameter: two as AdamW, unless the class is known to keep fewer."""
    drafted: int | None = None
    """Tokens that an EAGLE-3 head can draft; None for the whole vocabulary."""


@dataclass(frozen=True)
class Job:
    """A whole run."""

    model: ModelSize
    actor: ActorJob
    engine: EngineJob
    drafter: DrafterJob | None
    spot: bool
    """Whether the drafter trains while engines wait and the actor is offloaded."""
    devices_per_node: int
    prompt_tokens: int
    response_tokens: int
    responses: int
    """Of a step."""
    mini_batches: int
    staging_bytes: float
    reference: bool = False
    draft_tokens: int = 0
    prompts: int = 1 << 30
    """Responses per step; each engine needs at least one."""
    snapshots: bool = False
    """Whether ranks keep copies of their state in host memory."""
    adapters: bool = False
    """Whether engines keep their weights without adapters in host memory."""

    @property
    def world(self) -> int:
        return self.actor.layout.world

    @property
    def engines(self) -> int:
        return self.world // self.engine.tp


def job_of(config: TltConfig, on_gpu: bool | None = None) -> Job:
    """Converts a launch config; raises ConfigError if the architecture is unavailable.

    ``on_gpu``: whether it runs on GPUs, where Megatron's activations are fused by default; None: see ``runs_on_gpu``.
    """
    model = ModelSize.of(sizes_of(config)[0])
    layout = Layout.read(config.actor.megatron, config.launcher.world_size)
    return Job(
        model=model,
        actor=_actor(config, layout, model, runs_on_gpu(config) if on_gpu is None else on_gpu),
        engine=_engine(config),
        drafter=_drafter(config),
        spot=config.spot is not None,
        devices_per_node=config.launcher.nproc_per_node,
        prompt_tokens=config.rollout.max_prompt_tokens,
        response_tokens=config.rollout.max_response_tokens,
        responses=config.trainer.prompts_per_step * config.algorithm.group_size,
        mini_batches=config.trainer.mini_batches,
        staging_bytes=config.reshard.staging_mb * 2**20,
        reference=config.algorithm.kl.coefficient > 0,
        prompts=config.trainer.prompts_per_step,
        draft_tokens=config.speculation.num_speculative_tokens if config.speculation.enabled else 0,
        snapshots=config.elastic is not None,
        adapters=config.actor.lora is not None,
    )


def _actor(config: TltConfig, layout: Layout, model: ModelSize, on_gpu: bool) -> ActorJob:
    actor, megatron, ddp = config.actor, config.actor.megatron, config.actor.ddp
    bf16 = megatron.get("bf16") is True
    modules = megatron.get("recompute_modules") or Recompute.modules
    outside = model.vocab * model.hidden * (1 if model.tied else 2) if actor.lora is None else 0
    # the widest of embedding and projections, or of their adapters
    width, embedding = model.hidden if actor.lora is None else actor.lora.rank, model.vocab
    in_layers = width * max(model.ffn, model.query, model.hidden if actor.lora else 0)
    of_layers = actor.lora is not None or (
        actor.optimizer_split is not None and actor.optimizer_split.matrices != "all"
    )
    return ActorJob(
        layout=layout,
        bf16=bf16,
        fused=actor.transformer_impl == "transformer_engine",
        recompute=Recompute(
            megatron.get("recompute_granularity"),
            megatron.get("recompute_method") or "uniform",
            int(megatron.get("recompute_num_layers") or 1),
            tuple(modules),
        ),
        max_tokens=actor.max_tokens_per_micro_batch,
        chunk_tokens=actor.log_prob_chunk_tokens,
        optimizer=optimizer_memory(actor, bf16, outside / model.parameters),
        gradient_bytes=4 if not bf16 or ddp.get("grad_reduce_in_fp32", True) else 2,
        fused_activation=megatron.get("bias_activation_fusion", on_gpu) is True,
        overlap=ddp.get("overlap_grad_reduce") is True,
        trained=1.0 if actor.lora is None else adapter_weights(model, actor.lora) / model.parameters,
        largest_tensor=in_layers if actor.lora is not None else max(in_layers, width * embedding),
        largest_stepped=in_layers if of_layers else max(in_layers, width * embedding),
        logical_shards=logical_shards(config),
    )


def adapter_weights(model: ModelSize, lora: LoraConfig) -> int:
    """Weights of all adapters: for each adapted projection, rank times the sum of its widths."""
    narrow, feed = model.hidden + model.key, model.hidden + model.ffn
    wide = model.hidden + model.query
    sums = {"q_proj": wide, "k_proj": narrow, "v_proj": narrow, "o_proj": wide}
    sums |= dict.fromkeys(PROJECTIONS["mlp"], 0 if model.experts else feed)
    chosen = {name for target in lora.targets if target != "experts" for name in PROJECTIONS.get(target, (target,))}
    layer = sum(sums[name] for name in chosen) + ("experts" in lora.targets) * 3 * feed * model.experts
    return model.layers * lora.rank * layer


def _engine(config: TltConfig) -> EngineJob:
    vllm = config.rollout.vllm
    itemsize = 4 if vllm.get("dtype") in _WIDE else 2
    cache, blocks = str(vllm.get("kv_cache_dtype", "auto")), vllm.get("num_gpu_blocks_override")
    return EngineJob(
        tp=config.rollout.tensor_parallel_size,
        spread_experts=vllm.get("enable_expert_parallel") is True and config.rollout.tensor_parallel_size > 1,
        itemsize=itemsize,
        cache_itemsize=1 if cache.startswith("fp8") else itemsize,
        utilization=float(vllm.get("gpu_memory_utilization", _UTILIZATION)),
        max_sequences=int(vllm.get("max_num_seqs") or _SEQUENCES),
        batched_tokens=int(vllm.get("max_num_batched_tokens") or _BATCHED_TOKENS),
        cache_tokens=int(blocks) * int(vllm.get("block_size") or _BLOCK) if blocks else None,
    )


def _drafter(config: TltConfig) -> DrafterJob | None:
    drafter = config.drafter
    if drafter is None:
        return None
    num_aux_layers = kind_of(drafter.kind).num_aux_layers
    return DrafterJob(
        eagle3=num_aux_layers > 0,
        num_aux_layers=num_aux_layers
        if drafter.aux_hidden_state_layer_ids is None
        else len(drafter.aux_hidden_state_layer_ids),
        steps=drafter.steps,
        max_tokens=drafter.max_tokens_per_micro_batch,
        chunk_tokens=drafter.logit_chunk_tokens,
        entries_per_step=drafter.entries_per_step,
        session_steps=drafter.session_steps,
        drafted=drafter.draft_vocab_size,
        moments=1 if drafter.optimizer.endswith((".SGD", ".Lion", ".Adagrad", ".RMSprop")) else 2,
    )

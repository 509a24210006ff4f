"""Builds the Megatron-Core policy: process groups, configuration, model chunks, gradient buckets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import PretrainedConfig

from megatron_tlt.actor.batches import BatchShape
from megatron_tlt.actor.megatron_config import initialize_parallel_state, scale_rotary, transformer_config
from megatron_tlt.actor.megatron_layers import block_spec
from megatron_tlt.actor.megatron_lora import add_adapters, check_lora
from megatron_tlt.actor.megatron_weights import load_checkpoint_weights, load_weights
from megatron_tlt.checkpoint.weights import verify_weights
from megatron_tlt.config.schema import ActorConfig
from megatron_tlt.models.families import rope_parameters
from megatron_tlt.models.hf_folder import MEGATRON_PART, is_megatron_checkpoint, read_hf_config, side_files_of
from megatron_tlt.models.weight_map import WeightMap
from megatron_tlt.platform.device import current_device


@dataclass
class MegatronModel:
    """The policy's chunks on this rank (several under an interleaved pipeline), with their configuration."""

    hf_config: PretrainedConfig
    config: TransformerConfig
    weights: WeightMap
    chunks: list[GPTModel]
    ddp_chunks: list[DistributedDataParallel]

    @contextmanager
    def unfinished_gradients(self) -> Iterator[None]:
        """Backward passes inside sum gradients on this rank, and finish nothing: no reduction, no division."""
        finish, self.config.finalize_model_grads_func = self.config.finalize_model_grads_func, None
        try:
            yield
        finally:
            self.config.finalize_model_grads_func = finish

    @property
    def attention_share(self) -> float:
        """Operations of causal attention per pair of tokens, divided by the other operations per token."""
        config, hf = self.config, self.hf_config
        width = config.num_attention_heads * config.kv_channels
        layer = 2 * config.hidden_size * (width + config.num_query_groups * config.kv_channels)
        active = (
            config.moe_router_topk * config.moe_ffn_hidden_size if config.num_moe_experts else config.ffn_hidden_size
        )
        layer += 3 * config.hidden_size * active
        return config.num_layers * width / (config.num_layers * layer + config.hidden_size * hf.vocab_size)


def _build_chunk(
    config: TransformerConfig, hf_config: PretrainedConfig, actor: ActorConfig, vp_stage: int | None
) -> GPTModel:
    pre = parallel_state.is_pipeline_first_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage)
    post = parallel_state.is_pipeline_last_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage)
    tp = config.tensor_model_parallel_size
    model = GPTModel(
        config=config,
        transformer_layer_spec=block_spec(config, actor.transformer_impl, vp_stage),
        vocab_size=-(-hf_config.vocab_size // tp) * tp,
        max_sequence_length=hf_config.max_position_embeddings,
        pre_process=pre,
        post_process=post,
        parallel_output=True,
        share_embeddings_and_output_weights=bool(hf_config.tie_word_embeddings),
        position_embedding_type="rope",
        rotary_base=rope_parameters(hf_config)["rope_theta"],
        vp_stage=vp_stage,
    )
    scale_rotary(hf_config, model)
    return model.to(current_device().torch_device)


def build_model(
    model_folder: Path,
    actor: ActorConfig,
    seed: int,
    *,
    trainable: bool = True,
    verify: bool = True,
    distributed_optimizer: bool = True,
) -> MegatronModel:
    """Builds the model on this rank and loads its weights from a Hugging Face folder or a Megatron checkpoint.

    Args:
        model_folder: ``config.json`` and safetensors.
        actor: layout and pass-through options.
        seed: of Megatron's RNG trackers.
        trainable: wrap in Megatron's DDP, and add the adapters of ``actor.lora``; False for a reference model.
        verify: compare the weights with the folder's manifest first.
        distributed_optimizer: data-parallel ranks reduce a part of the gradients each; False: all of them.

    Raises:
        ConfigError: the architecture is not supported, or the layout does not fit.
        RunError: the weights are damaged.
    """
    hf_config = read_hf_config(side_files_of(model_folder))
    if verify:
        verify_weights(model_folder)
    initialize_parallel_state(actor.megatron, seed)
    config = transformer_config(hf_config, actor)
    vpp = config.virtual_pipeline_model_parallel_size
    stages: list[int | None] = [None] if vpp is None else list(range(vpp))
    chunks = [_build_chunk(config, hf_config, actor, stage) for stage in stages]
    weights = WeightMap(hf_config, str(model_folder))
    if is_megatron_checkpoint(model_folder):
        load_checkpoint_weights(chunks, model_folder / MEGATRON_PART)
    else:
        load_weights(weights, chunks, model_folder)
    if trainable and actor.lora is not None:
        check_lora(config)
        add_adapters(chunks, weights, actor.lora, seed)
    wrapped = [Float16Module(config, chunk) for chunk in chunks] if config.bf16 else chunks
    ddp_chunks = []
    if trainable:
        ddp_config = DistributedDataParallelConfig(
            **{"grad_reduce_in_fp32": True, **actor.ddp, "use_distributed_optimizer": distributed_optimizer}
        )
        ddp_chunks = [
            DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=i > 0)
            for i, chunk in enumerate(wrapped)
        ]
        config.finalize_model_grads_func = finalize_model_grads
        if ddp_config.overlap_grad_reduce:
            # Reduce gradients in the last micro-batch's backward pass only.
            waits = [chunk.no_sync for chunk in ddp_chunks]
            config.no_sync_func = waits if len(waits) > 1 else waits[0]
    else:
        ddp_chunks = wrapped
        for chunk in chunks:
            chunk.requires_grad_(False)
    return MegatronModel(hf_config, config, weights, chunks, ddp_chunks)


def batch_shape(model: MegatronModel, actor: ActorConfig) -> BatchShape:
    """How the model takes micro-batches."""
    config = model.config
    return BatchShape(
        max_tokens=actor.max_tokens_per_micro_batch,
        packed=actor.packing,
        attention_share=model.attention_share,
        count_multiple_of=config.pipeline_model_parallel_size if len(model.chunks) > 1 else 1,
        equal_counts=config.expert_model_parallel_size > 1,
        sequence_parallel_size=config.tensor_model_parallel_size if config.sequence_parallel else 1,
        context_parallel_size=config.context_parallel_size,
    )

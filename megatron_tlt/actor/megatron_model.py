"""Builds the Megatron-Core policy: process groups, configuration, model chunks, gradient buckets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import PretrainedConfig

from megatron_tlt.actor.megatron_bridge import DenseBridge, read_hf_config, scale_rotary
from megatron_tlt.actor.megatron_layers import block_spec
from megatron_tlt.config.schema import ActorConfig
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.families import rope_parameters
from megatron_tlt.platform.device import current_device, world_size

_LAYOUT_KEYS = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": None,
}


@dataclass
class MegatronModel:
    """The policy's chunks on this rank (one, or several under interleaved pipeline) and what belongs to them."""

    hf_config: PretrainedConfig
    config: TransformerConfig
    bridge: DenseBridge
    chunks: list[GPTModel]
    ddp_chunks: list[DistributedDataParallel]

    @property
    def attention_share(self) -> float:
        """Causal attention's operations per pair of tokens over the other operations per token."""
        config, hf = self.config, self.hf_config
        width = config.num_attention_heads * config.kv_channels
        layer = 2 * config.hidden_size * (width + config.num_query_groups * config.kv_channels)
        layer += 3 * config.hidden_size * config.ffn_hidden_size
        return config.num_layers * width / (config.num_layers * layer + config.hidden_size * hf.vocab_size)


def layout(megatron: dict[str, Any]) -> dict[str, Any]:
    """The parallel sizes that ``actor.megatron`` asks for, defaults filled in."""
    return {key: megatron.get(key, default) for key, default in _LAYOUT_KEYS.items()}


def initialize_parallel_state(megatron: dict[str, Any], seed: int) -> None:
    """Makes Megatron's process groups, once per process.

    Raises:
        ConfigError: the layout does not divide the world.
    """
    sizes = layout(megatron)
    model_parallel = (
        sizes["tensor_model_parallel_size"] * sizes["pipeline_model_parallel_size"] * sizes["context_parallel_size"]
    )
    if world_size() % model_parallel:
        raise ConfigError(
            f"actor.megatron: tensor x pipeline x context parallel = {model_parallel} does not divide "
            f"the world of {world_size()} processes"
        )
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(**sizes)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def _transformer_overrides(actor: ActorConfig) -> dict[str, Any]:
    given = dict(actor.megatron)
    bf16 = bool(given.get("bf16", False))
    dtype = torch.bfloat16 if bf16 else torch.float32
    overrides: dict[str, Any] = {
        "sequence_parallel": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": bf16,
        # Losses come as a sum and a count: Megatron divides by the count over all micro-batches and ranks.
        "calculate_per_token_loss": True,
        "variable_seq_lengths": True,
        # On gloo the batched form returns before data has arrived under interleaved pipeline.
        "batch_p2p_comm": current_device().is_cuda,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
    }
    overrides.update(given)
    return overrides


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


def build_model(model_folder: Path, actor: ActorConfig, seed: int, *, trainable: bool = True) -> MegatronModel:
    """Builds the model on this rank and loads its weights from a Hugging Face folder.

    Args:
        model_folder: ``config.json`` and safetensors.
        actor: layout and pass-through options.
        seed: of Megatron's RNG trackers.
        trainable: wrap in Megatron's DDP; False for a reference model.

    Raises:
        ConfigError: unsupported architecture, or a layout that does not fit.
    """
    hf_config = read_hf_config(model_folder)
    initialize_parallel_state(actor.megatron, seed)
    overrides = _transformer_overrides(actor)
    bridge = DenseBridge(hf_config, overrides["params_dtype"], overrides)
    config = bridge.config
    vpp = config.virtual_pipeline_model_parallel_size
    stages: list[int | None] = [None] if vpp is None else list(range(vpp))
    chunks = [_build_chunk(config, hf_config, actor, stage) for stage in stages]
    bridge.vocab_size = hf_config.vocab_size
    bridge.padded_vocab_size = chunks[0].vocab_size
    with torch.no_grad():
        bridge.load_weights(chunks, str(model_folder))
    wrapped = [Float16Module(config, chunk) for chunk in chunks] if config.bf16 else chunks
    ddp_chunks = []
    if trainable:
        ddp_config = DistributedDataParallelConfig(
            **{"use_distributed_optimizer": True, "grad_reduce_in_fp32": True, **actor.ddp}
        )
        ddp_chunks = [
            DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=i > 0)
            for i, chunk in enumerate(wrapped)
        ]
        config.finalize_model_grads_func = finalize_model_grads
    else:
        ddp_chunks = wrapped
        for chunk in chunks:
            chunk.requires_grad_(False)
    return MegatronModel(hf_config, config, bridge, chunks, ddp_chunks)

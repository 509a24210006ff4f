"""Megatron-Core layers for ``transformer_impl: local`` that the library provides only for Transformer Engine.

Shapes follow Megatron: (sequence, batch, heads, head_dim).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_tlt.actor import megatron_rotary
from megatron_tlt.errors import ConfigError
from megatron_tlt.platform.device import current_device


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with the constructor that Megatron calls and the attribute that sequence parallelism needs.

    Under sequence parallelism each rank processes a part of the tokens, so Megatron must all-reduce the gradient of
    weights with this attribute (the library's own wrapper refuses sequence parallelism instead).
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's description of a packed row, with the sequence lengths also on the host."""

    lengths: tuple[int, ...] = ()


def packed_seq_params(cu_seqlens: Sequence[int]) -> PackedSequences:
    """From the boundaries of a packed row's sequences, starting with 0, before context parallelism splits the row."""
    ends = torch.tensor(cu_seqlens, dtype=torch.int32, device=current_device().torch_device)
    lengths = tuple(stop - start for start, stop in pairwise(cu_seqlens))
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        lengths=lengths,
    )


class SdpaCoreAttention(MegatronModule):
    """Causal grouped-query attention by torch's scaled_dot_product_attention."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        self._context_group = pg_collection.cp if pg_collection else parallel_state.get_context_parallel_group()
        self.softmax_scale = softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Maps (s, b, heads, d) queries and (s, b, groups, d) keys and values to (s, b, heads * d).

        Packed rows have no b: (t, heads, d) and (t, groups, d) to (t, heads * d), with attention within a sequence.
        Under context parallelism, s (or t) counts this rank's positions, those of
        :func:`~megatron_tlt.actor.context.context_positions`.
        """
        ranks = self._context_group.size()
        if packed_seq_params is None:
            return self._attend_in_context(query, key, value)
        lengths = [length // ranks for length in packed_seq_params.lengths]
        parts = [tensor.unsqueeze(1).split(lengths) for tensor in (query, key, value)]
        return torch.cat([self._attend_in_context(q, k, v) for q, k, v in zip(*parts, strict=True)]).squeeze(1)

    def _attend_in_context(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attention over one sequence, or several of equal length as a batch; gathers other ranks' keys and values."""
        ranks = self._context_group.size()
        if ranks == 1:
            return self._attend(query, key, value)
        key, value = (self._whole(tensor) for tensor in (key, value))
        rank, part = self._context_group.rank(), query.shape[0] // 2
        out = []
        for at, rows in zip((rank, 2 * ranks - 1 - rank), query.split(part), strict=True):
            visible = (at + 1) * part
            out.append(self._attend(rows, key[:visible], value[:visible]))
        return torch.cat(out)

    def _whole(self, part: torch.Tensor) -> torch.Tensor:
        """Gathers all positions of a sequence in order; the backward pass sums each rank's own gradients over ranks."""
        parts = gather_from_sequence_parallel_region(part.contiguous(), group=self._context_group)
        halves = [held.chunk(2) for held in parts.chunk(self._context_group.size())]
        return torch.cat([first for first, _ in halves] + [last for _, last in reversed(halves)])

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Causal attention of ``query``, the last positions of a sequence, to the whole sequence."""
        length, batch = query.shape[:2]
        mask = None
        if length < key.shape[0]:
            mask = torch.ones(length, key.shape[0], dtype=torch.bool, device=query.device)
            mask = mask.tril(key.shape[0] - length)
        out = F.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            value.permute(1, 2, 0, 3),
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.softmax_scale,
            dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return out.permute(2, 0, 1, 3).reshape(length, batch, -1)


def block_spec(config: TransformerConfig, transformer_impl: str, vp_stage: int | None) -> Any:
    """The decoder block's specification for the chosen implementation.

    Raises:
        ConfigError: ``transformer_engine`` is selected but not installed.
    """
    if transformer_impl == "transformer_engine":
        try:
            import transformer_engine  # noqa: F401
        except ImportError as error:
            raise ConfigError(
                "actor.transformer_impl: found 'transformer_engine', which is not installed; allowed here: 'local'"
            ) from error
        return get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts, moe_grouped_gemm=True, qk_layernorm=config.qk_layernorm
        )
    megatron_rotary.install()
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
    )
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    if config.num_moe_experts:
        # Same keys as Transformer Engine's layers, so that each implementation reads the other's checkpoints.
        del layer.submodules.sharded_state_dict_keys_map["pre_mlp_layernorm."]
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = SdpaCoreAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[ModuleSpec(**vars(layer)) for _ in range(count)], layer_norm=RMSNorm)

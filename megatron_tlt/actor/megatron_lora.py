"""LoRA adapters beside Megatron-Core's parallel linear layers (Hu et al. 2021, arXiv:2106.09685).

An adapted layer returns ``W x + alpha / rank * B A dropout(x)``; ``W`` is frozen. Each Hugging Face projection has its
own pair (q, k and v of Megatron's one linear layer too), so that an export holds exactly what was trained.

Tensor parallelism: of a column-parallel layer ``A`` is on every rank and ``B`` is cut as the layer's rows are; of a
row-parallel one ``A`` is cut as its columns are and ``B`` is on every rank. Only the ``rank`` numbers per token between
``A`` and ``B`` are communicated.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from megatron_tlt.actor.megatron_weights import ADAPTERS, export_weights, whole_model_name, whole_tensor
from megatron_tlt.config.lora import LoraConfig
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.lora_weights import LORA_A, LORA_B, adapter_shapes, is_adapted, merged
from megatron_tlt.models.weight_map import Piece, WeightMap
from megatron_tlt.reshard.spans import Span


@dataclass(frozen=True)
class Factor:
    """A parameter of an adapter: its tensor's name, and its place in the whole one along ``dim``."""

    tensor: str
    parameter: torch.nn.Parameter
    dim: int
    start: int
    is_cut: bool
    """Whether tensor-parallel ranks hold different parts."""
    is_expert: bool

    @property
    def exported(self) -> bool:
        """Whether this rank is the replica that exports it."""
        return self.is_cut or self.is_expert or parallel_state.get_tensor_model_parallel_rank() == 0


class LinearAdapter(torch.nn.Module):
    """The adapters of one parallel linear layer, added to its output by a forward hook.

    Args:
        linear: the layer, whose weight is frozen.
        pieces: the parts of Hugging Face tensors in the layer's weight; those that are adapted have ``adapted`` names.
        adapted: names of adapted tensors, in the order of the layer's outputs.
        weights: shapes of the tensors.
        config: rank, alpha, dropout.
        seed: of the initial values, which do not depend on the layout.
    """

    def __init__(
        self,
        linear: ColumnParallelLinear | RowParallelLinear,
        pieces: Sequence[Piece],
        adapted: Sequence[str],
        weights: WeightMap,
        config: LoraConfig,
        seed: int,
    ) -> None:
        super().__init__()
        self._rows: torch.Tensor | None
        self._by_columns = isinstance(linear, ColumnParallelLinear)
        self._scale, self._dropout = config.alpha / config.rank, config.dropout
        alone = linear.explicit_expert_comm or linear.tp_group.size() == 1
        self._group = None if alone else linear.tp_group
        self._sequence_parallel = bool(linear.sequence_parallel) and not alone
        self.factors: list[Factor] = []
        self._downs, self._ups = torch.nn.ParameterList(), torch.nn.ParameterList()
        rows: list[int] = []  # where each output of the adapters goes
        like = linear.weight
        for name in adapted:
            own = [piece for piece in pieces if piece.name == name]
            cut = min(piece.start for piece in own)
            size = sum(piece.length for piece in own)
            out, into = weights.shapes[name]
            base = name.removesuffix(".weight")
            down = _initial(config.rank, into, f"{seed}/{name}").to(like)
            up = torch.zeros(size if self._by_columns else out, config.rank, dtype=like.dtype, device=like.device)
            if not self._by_columns:
                down = down[:, cut : cut + size].contiguous()
            places = (0, cut) if self._by_columns else (cut, 0)
            dims = (0, 0) if self._by_columns else (1, 0)
            for values, kind, dim, start, kept in zip(
                (down, up), (LORA_A, LORA_B), dims, places, (self._downs, self._ups), strict=True
            ):
                parameter = torch.nn.Parameter(values)
                is_cut = (kind == LORA_B) == self._by_columns
                _mark(parameter, like, dim if is_cut else None, self._sequence_parallel and not is_cut)
                kept.append(parameter)
                self.factors.append(Factor(base + kind, parameter, dim, start, is_cut, linear.is_expert))
            rows += [row for piece in own for row in range(piece.offset, piece.offset + piece.length)]
        in_order = not self._by_columns or rows == list(range(like.shape[0]))
        self.register_buffer("_rows", None if in_order else torch.tensor(rows, device=like.device), persistent=False)
        linear.register_forward_hook(self._add)

    def _add(self, linear: torch.nn.Module, given: tuple[Any, ...], result: tuple[torch.Tensor, Any]) -> Any:
        """The layer's result (.., out) with the adapters' of its input (.., in)."""
        inputs = F.dropout(given[0], self._dropout, self.training) if self._dropout else given[0]
        between = inputs @ torch.cat(tuple(self._downs)).t()
        if self._group is not None:
            between = self._across_ranks(between)
        rank = self._ups[0].shape[1]
        parts = [part @ up.t() for part, up in zip(between.split(rank, dim=-1), self._ups, strict=True)]
        added = self._scale * torch.cat(parts, dim=-1)
        output, *rest = result
        output = output + added if self._rows is None else output.index_add(-1, self._rows, added)
        return (output, *rest)

    def _across_ranks(self, between: torch.Tensor) -> torch.Tensor:
        if self._by_columns and self._sequence_parallel:
            return gather_from_sequence_parallel_region(between, group=self._group)
        if self._by_columns:
            return copy_to_tensor_model_parallel_region(between, group=self._group)
        if self._sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(between, group=self._group)
        return reduce_from_tensor_model_parallel_region(between, group=self._group)


class ChunkAdapters(torch.nn.Module):
    """All adapters of a chunk, as its submodule ``lora``.

    Args:
        chunk: the model's chunk; its weights become frozen.
        weights: the model's tensors.
        config: the launch config's section.
        seed: of the initial values.
    """

    def __init__(self, chunk: GPTModel, weights: WeightMap, config: LoraConfig, seed: int) -> None:
        super().__init__()
        chunk.requires_grad_(False)
        first_layer = chunk.decoder.layers[0].layer_number - 1 if len(chunk.decoder.layers) else 0
        first_expert = parallel_state.get_expert_model_parallel_rank() * (
            weights.num_experts // parallel_state.get_expert_model_parallel_world_size()
        )
        adapters = []
        for local, module in list(chunk.named_modules()):
            if not isinstance(module, ColumnParallelLinear | RowParallelLinear):
                continue
            name = whole_model_name(f"{local}.weight", first_layer, first_expert)
            expert = weights.is_expert(name)  # which are not cut, see check_lora
            rank = 0 if expert else parallel_state.get_tensor_model_parallel_rank()
            size = 1 if expert else parallel_state.get_tensor_model_parallel_world_size()
            pieces = weights.pieces(name, rank, size)
            adapted = [one for one in dict.fromkeys(piece.name for piece in pieces) if is_adapted(one, config.targets)]
            if adapted:
                adapters.append(LinearAdapter(module, pieces, adapted, weights, config, seed))
        self.adapters = torch.nn.ModuleList(adapters)
        if chunk.pre_process:
            # A recomputed block trains its parameters only if its input needs a gradient.
            chunk.embedding.register_forward_hook(_needs_gradient)

    @property
    def factors(self) -> Iterator[Factor]:
        """All parameters of the adapters."""
        for adapter in self.adapters:
            assert isinstance(adapter, LinearAdapter)
            yield from adapter.factors

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[tuple[int, int, int], ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Megatron's description of the parameters for a checkpoint of any layout, by the names of their tensors."""
        names = {id(parameter): name for name, parameter in self.named_parameters()}
        state = {}
        for factor in self.factors:
            axes = {factor.tensor: factor.dim} if factor.is_cut else {}
            groups = {}
            if factor.is_expert:
                groups["tp_group"] = parallel_state.get_expert_tensor_parallel_group()
                groups["dp_cp_group"] = parallel_state.get_expert_data_parallel_group()
            given = {factor.tensor: factor.parameter}
            made = make_sharded_tensors_for_checkpoint(given, prefix, axes, sharded_offsets, **groups)
            state[prefix + names[id(factor.parameter)]] = made[prefix + factor.tensor]
        return state


def add_adapters(chunks: Sequence[GPTModel], weights: WeightMap, config: LoraConfig, seed: int) -> None:
    """Adds adapters to all chunks and freezes their other parameters.

    Raises:
        ConfigError: a target is in no layer of the model.
    """
    for target in config.targets:
        if not any(is_adapted(name, (target,)) for name in weights.shapes):
            kind = weights.family.model_type
            raise ConfigError(f"actor.lora.targets: found {target}, which a {kind} lacks; allowed: parts that it has")
    for chunk in chunks:
        setattr(chunk, ADAPTERS, ChunkAdapters(chunk, weights, config, seed))


def adapter_spans(chunks: Sequence[GPTModel]) -> list[tuple[Span, torch.Tensor]]:
    """This rank's parts of the adapters' tensors, with views of the data; empty without adapters."""
    return [
        (Span(factor.tensor, factor.start, factor.parameter.shape[factor.dim]), factor.parameter.detach())
        for chunk in chunks
        if hasattr(chunk, ADAPTERS)
        for factor in chunk.lora.factors
    ]


@torch.no_grad()
def export_adapters(
    weights: WeightMap, chunks: Sequence[GPTModel], config: LoraConfig
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields every adapter's full tensor on every rank; a collective over the model-parallel groups."""
    held: dict[str, list[tuple[torch.Tensor, int, int]]] = {}
    for factor in (factor for chunk in chunks for factor in chunk.lora.factors):
        if factor.exported:
            held.setdefault(factor.tensor, []).append((factor.parameter.detach(), factor.dim, factor.start))
    dtype = next(chunks[0].parameters()).dtype
    for name, shape in adapter_shapes(weights.shapes, config.targets, config.rank).items():
        yield name, whole_tensor(name, shape, held.get(name, []), dtype)


@torch.no_grad()
def export_merged(
    weights: WeightMap, chunks: Sequence[GPTModel], config: LoraConfig, names: Collection[str] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """As ``export_weights``, with the adapters added to the weights."""
    wanted = weights.shapes if names is None else names
    has_adapted = any(is_adapted(name, config.targets) for name in wanted)
    adapters = dict(export_adapters(weights, chunks, config)) if has_adapted else {}
    for name, tensor in export_weights(weights, chunks, names):
        module = name.removesuffix(".weight")
        if module + LORA_A in adapters:
            tensor = merged(tensor, adapters[module + LORA_A], adapters[module + LORA_B], config.alpha / config.rank)
        yield name, tensor


def check_lora(config: TransformerConfig) -> None:
    """Raises ConfigError if the experts' layers are cut, which their adapters do not support."""
    if config.num_moe_experts and (config.expert_tensor_parallel_size or 1) > 1:
        raise ConfigError(
            f"actor.megatron.expert_tensor_parallel_size: found {config.expert_tensor_parallel_size}; allowed with "
            "actor.lora: 1"
        )


def _initial(rank: int, columns: int, key: str) -> torch.Tensor:
    """PEFT's initial values of A, (rank, columns) in float32: uniform within sqrt(1 / columns)."""
    seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") >> 1
    bound = math.sqrt(1.0 / columns)
    return (2.0 * torch.rand(rank, columns, generator=torch.Generator().manual_seed(seed)) - 1.0) * bound


def _mark(parameter: torch.nn.Parameter, like: torch.Tensor, dim: int | None, sequence_parallel: bool) -> None:
    """Megatron's attributes of a parameter: how it is cut, and over which ranks its gradient is summed."""
    is_summed_over_all = getattr(like, "allreduce", True)
    attributes = {
        "allreduce": is_summed_over_all,
        "sequence_parallel": sequence_parallel,
        # False: only the first tensor-parallel rank counts it in the gradient's norm; each has other experts
        "tensor_model_parallel": dim is not None or not is_summed_over_all,
        "partition_dim": -1 if dim is None else dim,
        "partition_stride": 1,
    }
    for name, value in attributes.items():
        setattr(parameter, name, value)


def _needs_gradient(module: torch.nn.Module, given: Any, output: torch.Tensor) -> torch.Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output

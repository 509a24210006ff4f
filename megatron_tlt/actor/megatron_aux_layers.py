"""Records hidden states during one of Megatron's forward passes, with hooks that are removed afterwards.

The residual stream of a rank is (S, R, H): S positions of R rows, namely this context-parallel rank's positions and,
under sequence parallelism, this tensor-parallel rank's part of them. Without sequence parallelism all tensor-parallel
ranks have the same positions; each keeps the part that it would have with it, so that every state is kept once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel

from megatron_tlt.actor.hidden_states import AuxHiddenStates, Holder, part_of
from megatron_tlt.actor.megatron_model import MegatronModel
from megatron_tlt.errors import ConfigError
from megatron_tlt.platform.collectives import all_gather_data
from megatron_tlt.platform.host_copies import HostCopies


class _Recorder:
    """Copies a layer's states to the host at each call, beside the computation.

    A stage runs a chunk's micro-batches in order.
    """

    def __init__(self, sequence_parallel: bool, dtype: torch.dtype, copies: HostCopies) -> None:
        self.calls: list[torch.Tensor | None] = []
        self._cut = not sequence_parallel
        self._copies = copies
        self._dtype = dtype

    def _record(self, states_SRH: torch.Tensor) -> None:
        if self._cut:
            part = part_of(
                states_SRH.shape[0],
                parallel_state.get_tensor_model_parallel_rank(),
                parallel_state.get_tensor_model_parallel_world_size(),
            )
            states_SRH = states_SRH[part]
        self.calls.append(self._copies.copy(states_SRH, self._dtype))

    def before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._record(kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])

    def after(self, module: Any, args: tuple[Any, ...], output: torch.Tensor) -> None:
        self._record(output)


def _entered_module(chunk: GPTModel, layer: int, num_layers: int) -> Any:
    """The chunk's module whose input is the residual stream at ``layer``, or None."""
    if layer == num_layers:
        return chunk.decoder.final_layernorm
    return next((found for found in chunk.decoder.layers if found.layer_number == layer + 1), None)


@contextmanager
def record_hidden_states(
    model: MegatronModel, aux_layers: Sequence[int], dtype: torch.dtype
) -> Iterator[AuxHiddenStates]:
    """Records this rank's states by column while the ``with`` block runs, which must be one forward pass.

    The states can be read after the block.

    Args:
        model: its layers may be on any ranks.
        aux_layers: layers whose input, the residual stream before any norm, is recorded: transformers'
            ``hidden_states[i]`` for i below the number of layers, and for i equal to it the stream before the final
            norm. The output of the final norm, which the LM head reads, is always recorded as the last column.
        dtype: of the copies on the host.

    Raises:
        ConfigError: the model has no such layer.
    """
    num_layers = model.config.num_layers
    if wrong := [layer for layer in aux_layers if not 0 <= layer <= num_layers]:
        raise ConfigError(f"auxiliary layers {wrong}; allowed: 0 to {num_layers}")
    recorders: dict[int, _Recorder] = {}
    copies = HostCopies()
    handles = []
    try:
        for chunk in model.chunks:
            for column, layer in enumerate(aux_layers):
                if (module := _entered_module(chunk, layer, num_layers)) is not None:
                    recorder = recorders[column] = _Recorder(model.config.sequence_parallel, dtype, copies)
                    handles.append(module.register_forward_pre_hook(recorder.before, with_kwargs=True))
            if (module := chunk.decoder.final_layernorm) is not None:
                recorder = recorders[len(aux_layers)] = _Recorder(model.config.sequence_parallel, dtype, copies)
                handles.append(module.register_forward_hook(recorder.after))
        yield {column: recorder.calls for column, recorder in recorders.items()}
        copies.wait()
    finally:
        for handle in handles:
            handle.remove()


def holders(model: MegatronModel, aux_layers: Sequence[int]) -> list[Holder]:
    """The ranks that process this rank's samples, in rank order; a collective over the world.

    Raises:
        ConfigError: the model has no such layer.
    """
    with record_hidden_states(model, aux_layers, torch.float32) as states:
        columns = sorted(states)
    own = Holder(
        data=parallel_state.get_data_parallel_rank(),
        context=parallel_state.get_context_parallel_rank(),
        tensor=parallel_state.get_tensor_model_parallel_rank(),
        rank=torch.distributed.get_rank(),
        columns=columns,
    )
    return [holder for holder in all_gather_data(own, Holder) if holder.data == own.data]

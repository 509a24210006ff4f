"""Rotary embeddings of packed rows without reading sequence lengths on the host.

Megatron-Core's unfused function (``rope_utils._apply_rotary_pos_emb_thd``) calls ``tolist`` and ``item`` on tensors of
the device: two synchronizations a call, four per layer and pass. Transformer Engine's fused kernel has none, but needs
Transformer Engine.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from megatron.core.models.common.embeddings import rope_utils

from megatron_tlt.errors import RunError

_NAME = "_apply_rotary_pos_emb_thd"
_PARAMETERS = ("t", "cu_seqlens", "freqs", "rotary_interleaved", "multi_latent_attention", "mscale", "cp_group")
_library_function = getattr(rope_utils, _NAME)


def apply_packed_rotary(
    t: torch.Tensor,
    cu_seqlens: torch.Tensor,
    freqs: torch.Tensor,
    rotary_interleaved: bool = False,
    multi_latent_attention: bool = False,
    mscale: float = 1.0,
    cp_group: Any = None,
) -> torch.Tensor:
    """Rotates the tokens of packed sequences by their positions; the same bits as Megatron-Core's function.

    Args:
        t: (tokens of this rank, heads, d).
        cu_seqlens: (sequences + 1), from 0 to the number of tokens of all context-parallel ranks.
        freqs: (at least the longest sequence, 1, 1, d).
        rotary_interleaved, multi_latent_attention, mscale: as in the library.
        cp_group: the context-parallel ranks that share each sequence.
    """
    options = {
        "rotary_interleaved": rotary_interleaved,
        "multi_latent_attention": multi_latent_attention,
        "mscale": mscale,
    }
    assert cp_group is not None, "a packed row has a context-parallel group"
    ranks, rank = cp_group.size(), cp_group.rank()
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]) // ranks
    # of each token: the first of its sequence on this rank, and the sequence's length here
    starts, counts = (
        torch.repeat_interleave(values, lengths, output_size=len(t)) for values in (cu_seqlens[:-1] // ranks, lengths)
    )
    positions = torch.arange(len(t), device=t.device) - starts
    if ranks > 1:  # this rank has the parts ``rank`` and ``2 * ranks - 1 - rank`` of each sequence
        half = counts // 2
        second = positions + counts * ranks - (rank + 2) * half
        positions = torch.where(positions < half, positions + rank * half, second)
    rotated: torch.Tensor = rope_utils._apply_rotary_pos_emb_bshd(t.unsqueeze(1), freqs[positions], **options)
    return rotated.squeeze(1)


def install() -> None:
    """Replaces Megatron-Core's function in this process.

    Raises:
        RunError: the installed release has another signature.
    """
    found = tuple(inspect.signature(_library_function).parameters)
    if found != _PARAMETERS:
        raise RunError(f"megatron-core: rope_utils.{_NAME} takes {found}; allowed: {_PARAMETERS}")
    setattr(rope_utils, _NAME, apply_packed_rotary)

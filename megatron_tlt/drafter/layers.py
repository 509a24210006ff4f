"""A Llama-form decoder layer in plain torch, over packed sequences and over unrolled draft steps.

Shapes: T packed tokens (concatenated sequences, no padding), H hidden size, N query heads, G key/value heads, D width
of a head. Parameters are named so that a model's ``state_dict`` has the names of the folder that vLLM loads.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_tlt.errors import ConfigError
from megatron_tlt.models.families import head_dim, rope_parameters

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_QUERY_CHUNK = 512


def rotary_frequencies(config: PretrainedConfig) -> torch.Tensor:
    """The D/2 angles per position, as transformers computes them for the config's ``rope_parameters``.

    Raises:
        ConfigError: the scaling also scales attention.
    """
    rope = rope_parameters(config)
    if rope["rope_type"] == "default":
        width = head_dim(config)
        return 1.0 / rope["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, device=None)
    if factor != 1.0:
        raise ConfigError(f"config.json: rope_type {rope['rope_type']!r} scales attention by {factor}; allowed: 1.0")
    return frequencies


def rotate(x_TND: torch.Tensor, angles_TD2: torch.Tensor) -> torch.Tensor:
    """Rotary positions on halves of a head (as in Llama), computed in float32."""
    cos, sin = angles_TD2.cos()[:, None], angles_TD2.sin()[:, None]
    first, second = x_TND.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_TND.dtype)


class UnrolledContext:
    """State shared by the draft steps of a pack: its sequences, and each step's keys and values.

    Step 0 is causal and reads the target's features at every position. Step j continues from each position's own
    drafts: its token is ``j`` positions later and attends to the step-0 keys up to the position, then to its own
    drafts' keys of steps 1..j (EAGLE-3, 2503.01840, section 3.2). The drafter attends to the same keys at inference.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths = list(lengths)
        self.positions_T = torch.cat([torch.arange(length, device=device) for length in lengths])
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    @property
    def steps(self) -> int:
        """Number of completed steps."""
        return len(self.keys)

    def attend(self, q_TND: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor) -> torch.Tensor:
        """The next step's attention, (T, N, D); stores its keys and values for later steps."""
        repeats = q_TND.shape[1] // k_TGD.shape[1]
        self.keys.append(k_TGD.repeat_interleave(repeats, dim=1))
        self.values.append(v_TGD.repeat_interleave(repeats, dim=1))
        ends = itertools.accumulate(self.lengths)
        parts = [self._attend_one(q_TND, end - length, end) for end, length in zip(ends, self.lengths, strict=True)]
        return torch.cat(parts)

    def _attend_one(self, q_TND: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Attention within one sequence; nothing outside ``start .. stop`` is multiplied with it."""
        if self.steps == 1:
            q, k, v = (x[start:stop].transpose(0, 1)[None] for x in (q_TND, self.keys[0], self.values[0]))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1)
        chunks = range(start, stop, _QUERY_CHUNK)
        return torch.cat([self._attend_chunk(q_TND, start, low, min(low + _QUERY_CHUNK, stop)) for low in chunks])

    def _attend_chunk(self, q_TND: torch.Tensor, start: int, low: int, high: int) -> torch.Tensor:
        """Queries ``low .. high`` of an unrolled step; the mask is (chunk, keys up to the chunk + own drafts)."""

        def gathered(steps: list[torch.Tensor]) -> torch.Tensor:
            return torch.cat([steps[0][start:high], *(later[low:high] for later in steps[1:])]).transpose(0, 1)[None]

        rows = torch.arange(low, high, device=q_TND.device)
        causal = torch.arange(start, high, device=q_TND.device) <= rows[:, None]
        own = torch.eye(high - low, dtype=torch.bool, device=q_TND.device)
        mask = torch.cat([causal, *[own] * (self.steps - 1)], dim=1)
        q = q_TND[low:high].transpose(0, 1)[None]
        out = F.scaled_dot_product_attention(q, gathered(self.keys), gathered(self.values), attn_mask=mask)
        return out[0].transpose(0, 1)


class DraftAttention(nn.Module):
    """Grouped-query attention without biases; ``input_size`` is H (EAGLE) or 2 H (EAGLE-3)."""

    def __init__(self, config: PretrainedConfig, input_size: int) -> None:
        super().__init__()
        self.head_dim = head_dim(config)
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(input_size, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(input_size, groups * self.head_dim, bias=False)
        self.v_proj = nn.Linear(input_size, groups * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, config.hidden_size, bias=False)
        self.register_buffer("frequencies", rotary_frequencies(config), persistent=False)

    def forward(self, x_TI: torch.Tensor, context: UnrolledContext) -> torch.Tensor:
        """(T, input size) -> (T, H)."""
        q, k, v = (layer(x_TI).unflatten(-1, (-1, self.head_dim)) for layer in (self.q_proj, self.k_proj, self.v_proj))
        frequencies: torch.Tensor = self.frequencies  # type: ignore[assignment]
        angles = (context.positions_T + context.steps)[:, None] * frequencies
        return self.o_proj(context.attend(rotate(q, angles), rotate(k, angles), v).flatten(1))


class DraftMlp(nn.Module):
    """SwiGLU MLP."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_TH)) * self.up_proj(x_TH))


class DraftLayer(nn.Module):
    """Attention and MLP on a residual stream; each drafter applies its own norm before attention."""

    def __init__(self, config: PretrainedConfig, input_size: int) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config, input_size)
        self.post_attention_layernorm = DraftNorm(config)
        self.mlp = DraftMlp(config)

    def run(self, x_TI: torch.Tensor, residual_TH: torch.Tensor, context: UnrolledContext) -> torch.Tensor:
        """The stream after the layer, (T, H); attention reads ``x_TI``."""
        residual_TH = residual_TH + self.self_attn(x_TI, context)
        return residual_TH + self.mlp(self.post_attention_layernorm(residual_TH))


class DraftNorm(nn.RMSNorm):
    """RMSNorm over H with the target's epsilon, computed in float32 for any dtype of the stream."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        return super().forward(x_TH.float()).to(x_TH.dtype)

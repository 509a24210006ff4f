"""Forward pass of a drafter model over arbitrary tokens of arbitrary requests, in vLLM's proposer.

Suffixes of tensors: B requests, T tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron_tlt.platform.copies import copy_to_device
from megatron_tlt.rollout.vllm_draft_sampling import DraftsEnded


@dataclass
class HeadInput:
    """Consecutive tokens of a request that the head has not processed.

    ``row`` is the request's row in vLLM's batch, ``position`` the first token's position. ``states`` (tokens, features)
    are the target's hidden states.
    """

    row: int
    position: int
    states: torch.Tensor

    def cut(self, length: int) -> tuple[HeadInput, HeadInput]:
        """Split into the first ``length`` tokens and the rest."""
        return (
            HeadInput(self.row, self.position, self.states[:length]),
            HeadInput(self.row, self.position + length, self.states[length:]),
        )


def chunks(inputs: Iterable[HeadInput], limit: int) -> Iterable[list[HeadInput]]:
    """Group ``inputs`` in order, splitting them where needed, so that no group has more than ``limit`` tokens."""
    group: list[HeadInput] = []
    room = limit
    for whole in inputs:
        rest = whole
        while len(rest.states) > room:
            if room:
                first, rest = rest.cut(room)
                group.append(first)
            yield group
            group, room = [], limit
        group.append(rest)
        room -= len(rest.states)
    if group:
        yield group


class DrafterHead:
    """Runs vLLM's EAGLE proposer on inputs assembled here; fills its KV cache at their positions.

    The head at position i reads the target's states at i and token i + 1. It has one layer, so a token's KV cache entry
    depends on that token's input alone. A gap can therefore be filled later, in any pieces, with the same result.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._proposer = runner.drafter

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens of one forward pass."""
        return int(self._proposer.max_num_tokens)

    def fill(self, inputs: Iterable[HeadInput], metadata: Any, sampling: Any) -> None:
        """Fill the KV cache at the inputs' positions without drafting."""
        for group in chunks(inputs, self.max_tokens):
            self.propose(group, 0, metadata, sampling)

    def propose(self, inputs: Sequence[HeadInput], num_tokens: int, metadata: Any, sampling: Any) -> None:
        """Fill the KV cache, then draft up to ``num_tokens`` tokens after each input; ``DraftSampler`` receives them.

        Args:
            inputs: at most ``max_tokens`` tokens in total; a request that drafts must end with its newest token.
            metadata: vLLM's CommonAttentionMetadata of the target's step, for its block table.
            sampling: vLLM's SamplingMetadata of the step.
        """
        from vllm.v1.attention.backend import CommonAttentionMetadata

        proposer, batch = self._proposer, self._runner.input_batch
        lengths = np.array([len(part.states) for part in inputs], dtype=np.int64)
        rows = np.array([part.row for part in inputs], dtype=np.int64)
        firsts = np.array([part.position for part in inputs], dtype=np.int64)
        ends = firsts + lengths
        starts = np.zeros(len(inputs) + 1, dtype=np.int32)
        np.cumsum(lengths, out=starts[1:])
        total = int(starts[-1])
        of_tokens = np.repeat(rows, lengths)
        positions = np.arange(total) + np.repeat(firsts - starts[:-1], lengths)
        lasts = ends.astype(np.int32)
        table = metadata.block_table_tensor
        rows_B, starts_B, lasts_B, next_B, rows_T, positions_T, tokens_T = copy_to_device(
            [
                rows,
                starts,
                lasts,
                batch.token_ids_cpu[rows, ends],
                of_tokens,
                positions,
                batch.token_ids_cpu[of_tokens, positions],
            ],
            table.device,
        )
        blocks_T = table[rows_T, positions_T // proposer.block_size]
        with contextlib.suppress(DraftsEnded):
            proposer.propose(
                num_speculative_tokens=num_tokens,
                target_token_ids=tokens_T,
                target_positions=positions_T,
                target_hidden_states=torch.cat([part.states for part in inputs]),
                next_token_ids=next_B,
                token_indices_to_sample=None,
                common_attn_metadata=CommonAttentionMetadata(
                    query_start_loc=starts_B,
                    query_start_loc_cpu=torch.from_numpy(starts),
                    # the proposer increments these two in place for each draft token
                    seq_lens=lasts_B,
                    seq_lens_cpu_upper_bound=torch.from_numpy(lasts.copy()),
                    num_reqs=len(inputs),
                    num_actual_tokens=total,
                    max_query_len=int(lengths.max()),
                    max_seq_len=int(lasts.max()),
                    block_table_tensor=table[rows_B],
                    slot_mapping=blocks_T.long() * proposer.block_size + positions_T % proposer.block_size,
                    causal=True,
                ),
                sampling_metadata=sampling,
            )

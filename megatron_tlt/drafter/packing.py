"""Packs entries without padding, with the inputs of every unrolled draft step.

Shapes: S tokens of all sequences in a pack, T their draft positions (two fewer per sequence), E width of an entry's
hidden states, F the columns that the drafter reads.
Position a of a sequence drafts x_{a+2+j} in step j, from x_{a+1+j} and, in step 0, from h_a.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_tlt.config.drafter import DrafterLossConfig
from megatron_tlt.data.packing import plan_packs, sequence_cost
from megatron_tlt.drafter.entry import Entry
from megatron_tlt.drafter.losses import reward_weight
from megatron_tlt.errors import ConfigError

# Attention's share of a draft layer's work per pair of tokens; used only to balance packs.
_ATTENTION_SHARE = 1e-4


@dataclass(frozen=True)
class Pack:
    """Packed entries.

    Attributes:
        lengths: draft positions of each sequence.
        token_ids_S: all tokens.
        hidden_SE: the target's hidden states at these tokens.
        weights_T: weight of each draft position's loss.
        anchors_T: token of each draft position (that of its h), as an index into S.
        last_T: last token of its sequence, as an index into S.
        first_T: first token of its sequence from which a response token is drafted, as an index into S.
        log_sums_S: ``log sum exp`` of the target's logits after each token; set during training if needed.
    """

    lengths: list[int]
    token_ids_S: torch.Tensor
    hidden_SE: torch.Tensor
    weights_T: torch.Tensor
    anchors_T: torch.Tensor
    last_T: torch.Tensor
    first_T: torch.Tensor
    log_sums_S: torch.Tensor | None = None

    def to(self, device: torch.device) -> Pack:
        """A copy on ``device``."""
        moved = {
            name: value.to(device, non_blocking=True)
            for name, value in vars(self).items()
            if isinstance(value, torch.Tensor)
        }
        return Pack(lengths=self.lengths, **moved)

    def inputs(self, step: int) -> torch.Tensor:
        """The input token of each draft position in a step, (T); arbitrary beyond the end of a sequence."""
        return self.token_ids_S[torch.minimum(self.anchors_T + 1 + step, self.last_T)]

    def drafted(self, step: int) -> torch.Tensor:
        """The token that each draft position has to predict in a step, (T); valid at :meth:`rows`."""
        return self.token_ids_S[torch.minimum(self.anchors_T + 2 + step, self.last_T)]

    def rows(self, step: int) -> torch.Tensor:
        """The draft positions whose predicted token is in the response, ascending; indices into T.

        The target itself produces the response's first token, so drafts begin after it.
        """
        inside = (self.anchors_T >= self.first_T) & (self.anchors_T + 2 + step <= self.last_T)
        return inside.nonzero()[:, 0]


def build_pack(entries: Sequence[Entry], loss: DrafterLossConfig) -> Pack:
    """Pack entries."""
    starts = itertools.accumulate((entry.length for entry in entries[:-1]), initial=0)
    lengths = [entry.length - 2 for entry in entries]
    pairs = list(zip(starts, entries, strict=True))

    def per_position(values: list[float] | list[int]) -> torch.Tensor:
        return torch.tensor(values).repeat_interleave(torch.tensor(lengths))

    return Pack(
        lengths=lengths,
        token_ids_S=torch.cat([entry.token_ids.long() for entry in entries]),
        hidden_SE=torch.cat([entry.hidden for entry in entries]),
        weights_T=per_position([reward_weight(loss, entry.reward) for entry in entries]).float(),
        anchors_T=torch.cat([start + torch.arange(entry.length - 2) for start, entry in pairs]),
        last_T=per_position([start + entry.length - 1 for start, entry in pairs]),
        first_T=per_position([start + entry.prompt_length - 1 for start, entry in pairs]),
    )


def build_packs(
    entries: Sequence[Entry], max_tokens: int, loss: DrafterLossConfig, entry_size: int
) -> list[tuple[Pack, list[Entry]]]:
    """Distribute entries over few packs of at most ``max_tokens`` tokens and similar work.

    Each pack is returned with its entries. Entries too short to draft from are left out.

    Raises:
        ConfigError: an entry is longer than ``max_tokens``, or its hidden states do not have width ``entry_size``.
    """
    for entry in entries:
        if entry.width != entry_size:
            raise ConfigError(
                f"drafter entry {entry.key!r} has hidden states of width {entry.width}; "
                f"the drafter asks for {entry_size}"
            )
    drafted = [entry for entry in entries if entry.num_drafted]
    lengths = [entry.length for entry in drafted]
    costs = [sequence_cost(length, _ATTENTION_SHARE) for length in lengths]
    packs = [[drafted[i] for i in members] for members in plan_packs(lengths, costs, max_tokens)]
    return [(build_pack(members, loss), members) for members in packs]


def uniform_noise(entries: Sequence[Entry], size: int, width: float, seed: int, version: int) -> torch.Tensor:
    """Noise in ``-width .. width`` on the features of a pack, (T, size); an entry gets the same noise in any pack."""
    drawn = []
    for entry in entries:
        digest = hashlib.blake2b(f"{seed}/{version}/{entry.key}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
        drawn.append((torch.rand(entry.length - 2, size, generator=generator) * 2.0 - 1.0) * width)
    return torch.cat(drawn)

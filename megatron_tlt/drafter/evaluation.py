"""Greedy acceptance of consecutive drafts, evaluated on existing sequences of the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_tlt.config.drafter import DrafterLossConfig
from megatron_tlt.drafter.entry import Entry
from megatron_tlt.drafter.model import DraftModel, project
from megatron_tlt.drafter.packing import build_packs

_CHUNK_ROWS = 1024


@dataclass(frozen=True)
class Acceptance:
    """Greedy acceptance over chains of drafts, one from each position of a response where drafting can begin.

    Attributes:
        chains: number of chains.
        accepted_per_depth: share of chains that are still correct at each depth (1, 2, ..., K).
    """

    chains: int
    accepted_per_depth: tuple[float, ...]

    @property
    def mean_accepted(self) -> float:
        """Accepted drafts per chain."""
        return sum(self.accepted_per_depth)

    @property
    def acceptance_length(self) -> float:
        """Tokens per verification: accepted drafts plus the target's own next token."""
        return 1.0 + self.mean_accepted


def _argmax(model: DraftModel, head_input_TH: torch.Tensor) -> torch.Tensor:
    """The likeliest token of each row, (T); computes the logits of some rows at a time."""
    drafted = torch.cat([project(rows, model.head_DH).argmax(-1) for rows in head_input_TH.split(_CHUNK_ROWS)])
    return drafted if model.draft_ids_D is None else model.draft_ids_D[drafted]


@torch.no_grad()
def greedy_chains(
    model: DraftModel, token_ids_T: torch.Tensor, hidden_TF: torch.Tensor, lengths: Sequence[int], depth: int
) -> torch.Tensor:
    """The drafter's greedy proposals at every position, each chain continued from its own drafts: (T, depth) token ids.

    ``token_ids_T[t]`` is the token after that of ``hidden_TF[t]``, as in vLLM's drafter input.
    """
    features, context = model.start(hidden_TF, lengths)
    tokens = token_ids_T
    drafts = []
    for _ in range(depth):
        head_input, features = model(tokens, features, context)
        tokens = _argmax(model, head_input)
        drafts.append(tokens)
    return torch.stack(drafts, dim=1)


@torch.no_grad()
def teacher_forced_acceptance(model: DraftModel, entries: Sequence[Entry], depth: int, max_tokens: int) -> Acceptance:
    """The expected greedy acceptance of chains of ``depth`` drafts on held-out entries.

    A draft counts if it and all drafts before it in the chain equal the sequence's next tokens. Chains near the end of
    a sequence have fewer tokens to predict, as in decoding.

    Args:
        model: the drafter.
        entries: held-out sequences with their hidden states.
        depth: drafts per chain (K).
        max_tokens: per pack.

    Raises:
        ConfigError: the entries do not fit the drafter or are longer than ``max_tokens``.
    """
    device = next(model.parameters()).device
    right = torch.zeros(depth, dtype=torch.float64, device=device)
    chains = 0
    for on_host, _ in build_packs(entries, max_tokens, DrafterLossConfig(), model.entry_size):
        pack = on_host.to(device)
        hidden_TF = pack.hidden_SE[pack.anchors_T, : model.feature_size]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            drafts = greedy_chains(model, pack.inputs(0), hidden_TF, pack.lengths, depth)
        alive = torch.zeros(len(drafts), dtype=torch.bool, device=device)
        alive[pack.rows(0)] = True
        chains += int(alive.sum())
        for step in range(depth):
            within = torch.zeros_like(alive)
            within[pack.rows(step)] = True
            alive = alive & within & (drafts[:, step] == pack.drafted(step))
            right[step] += alive.sum()
    shares = (right / max(1, chains)).tolist()
    return Acceptance(chains, tuple(shares))

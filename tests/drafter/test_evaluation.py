"""Draft chains against decoding one by one, and acceptance against direct counting."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from megatron_tlt.drafter.entry import Entry
from megatron_tlt.drafter.evaluation import greedy_chains, teacher_forced_acceptance
from megatron_tlt.drafter.folder import drafter_from_target
from megatron_tlt.drafter.layers import UnrolledContext
from megatron_tlt.drafter.model import DraftModel, Kind

from .conftest import random_entry

DEPTH = 4
KINDS: tuple[Kind, ...] = ("eagle", "eagle3")


@torch.no_grad()
def decoded(model: DraftModel, entry: Entry, anchor: int) -> list[int]:
    """Drafts after ``anchor``, from a plain causal sequence extended with its own tokens and features."""
    tokens = entry.token_ids[1 : anchor + 2].long()
    features = model.combine(entry.hidden[: anchor + 1, : model.feature_size])
    drafts: list[int] = []
    for _ in range(DEPTH):
        head_input, following = model(tokens, features, UnrolledContext([len(tokens)], torch.device("cpu")))
        drafts.append(int(F.linear(head_input[-1], model.head_DH).argmax()))
        tokens = torch.cat([tokens, torch.tensor(drafts[-1:])])
        features = torch.cat([features, following[-1:]])
    return drafts


@pytest.mark.parametrize("kind", KINDS)
def test_chains_equal_drafts_decoded_one_by_one(kind: Kind, target_folder: Path, target: PreTrainedModel) -> None:
    model = drafter_from_target(target_folder, kind, seed=1)
    entries = [random_entry(target, kind, length, 3, seed) for seed, length in enumerate((9, 15))]
    tokens = torch.cat([entry.token_ids[1:-1].long() for entry in entries])
    hidden = torch.cat([entry.hidden[:-2, : model.feature_size] for entry in entries])
    chains = greedy_chains(model, tokens, hidden, [7, 13], DEPTH)
    expected = [decoded(model, entry, anchor) for entry in entries for anchor in range(entry.length - 2)]
    assert chains.tolist() == expected


@pytest.mark.parametrize("kind", KINDS)
def test_acceptance_counts_response_positions(kind: Kind, target_folder: Path, target: PreTrainedModel) -> None:
    model = drafter_from_target(target_folder, kind, seed=1)
    entries = []
    for seed in range(3):
        entry = random_entry(target, kind, 20, 4, seed)
        for at in range(6, 18, 4):  # make some tokens correct, so that acceptance is not zero
            entry.token_ids[at : at + 2] = torch.tensor(decoded(model, entry, at - 2)[:2])
        entries.append(entry)
    counts = [0] * DEPTH
    chains = 0
    for entry in entries:
        for anchor in range(entry.prompt_length - 1, entry.length - 2):
            chains += 1
            for depth, draft in enumerate(decoded(model, entry, anchor)):
                if anchor + 2 + depth >= entry.length or draft != entry.token_ids[anchor + 2 + depth]:
                    break
                counts[depth] += 1
    found = teacher_forced_acceptance(model, entries, DEPTH, max_tokens=45)
    assert found.chains == chains == 3 * 15
    assert found.accepted_per_depth == tuple(count / chains for count in counts)
    assert found.accepted_per_depth[0] > 0.2 and found.accepted_per_depth[1] > 0
    assert found.acceptance_length == pytest.approx(1 + sum(counts) / chains)
    assert teacher_forced_acceptance(model, [], DEPTH, 45).acceptance_length == 1.0

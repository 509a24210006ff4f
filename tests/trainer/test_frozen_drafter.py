"""The run's first drafter against its newest: on the same responses, of the ranks whose drafter is the newest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_tlt.drafter import Entry, drafter_from_target, greedy_chains, teacher_forced_acceptance
from megatron_tlt.trainer import frozen_drafter
from megatron_tlt.trainer.frozen_drafter import HELD_TOKENS, compare_with_frozen, held
from tests.drafter.conftest import load_target, random_entry, scattered, write_target

DEPTH = 3


def entry_of(length: int) -> Entry:
    return Entry(str(length), 0, torch.zeros(length, dtype=torch.int32), 1, torch.zeros(length, 1), 0.0)


def test_responses_are_held_up_to_a_bound() -> None:
    found: Sequence[Entry] = []
    for length in (HELD_TOKENS - 10, 20, 10, 1):
        found = held(found, entry_of(length))
    assert [entry.length for entry in found] == [HELD_TOKENS - 10, 10]
    assert [entry.length for entry in held([], entry_of(2 * HELD_TOKENS))] == [2 * HELD_TOKENS]


def test_both_are_counted_on_the_same_chains_of_the_newest_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_target("qwen2-untied", tmp_path)
    target, frozen = load_target(folder), drafter_from_target(folder, "eagle", seed=1)
    adapted = scattered(drafter_from_target(folder, "eagle", seed=1))
    entries = [random_entry(target, "eagle", 24, 4, seed) for seed in range(4)]
    for entry, at in ((entry, at) for entry in entries for at in range(8, 22, 3)):  # what the adapted one gets right
        hidden = entry.hidden[:-2, : adapted.feature_size]
        chains = greedy_chains(adapted, entry.token_ids[1:-1].long(), hidden, [len(hidden)], 1)
        entry.token_ids[at] = chains[at - 2, 0]
    alone = compare_with_frozen(frozen, adapted, 7, entries, DEPTH, 256)
    expected = {
        "drafter/frozen_acceptance_length": teacher_forced_acceptance(frozen, entries, DEPTH, 256).acceptance_length,
        "drafter/adapted_acceptance_length": teacher_forced_acceptance(adapted, entries, DEPTH, 256).acceptance_length,
    }
    assert alone == pytest.approx(expected) and expected["drafter/adapted_acceptance_length"] > 1.1

    def beside(version: int, chains: int) -> Any:
        other = frozen_drafter._Counts(version, chains, 0.0, 0.0)
        monkeypatch.setattr(frozen_drafter, "all_gather_data", lambda mine, kind: [mine, other])
        return compare_with_frozen(frozen, adapted, 7, entries, DEPTH, 256)

    count = teacher_forced_acceptance(adapted, entries, DEPTH, 256).chains
    assert beside(version=6, chains=50) == pytest.approx(expected), "an older drafter does not count"
    halved = {name: 1.0 + (length - 1.0) / 2 for name, length in expected.items()}
    assert beside(version=7, chains=count) == pytest.approx(halved)
    assert beside(version=9, chains=0) == pytest.approx(expected), "a rank without responses says nothing"


def test_without_responses_there_is_nothing_to_compare(tmp_path: Path) -> None:
    drafter = drafter_from_target(write_target("qwen2-untied", tmp_path), "eagle", seed=1)
    assert compare_with_frozen(drafter, drafter, 3, [], DEPTH, 256) == {}

"""The drafter packing benchmark's padded baselines: the same gradients, and as much padding as they say."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from megatron_tlt.bench import drafter_packing
from megatron_tlt.bench.drafter_packing import IN_ORDER, PACKED, SORTED, WHOLE
from megatron_tlt.bench.tiny_models import write_tiny_model
from megatron_tlt.drafter.model import Kind


def arguments_of(*values: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    drafter_packing.add_arguments(parser)
    return parser.parse_args(values)


def test_groups_are_what_their_names_say() -> None:
    lengths = [5, 40, 6, 7, 30]
    assert drafter_packing._groups(WHOLE, 2, lengths) == [[0, 1], [2, 3], [4]]
    assert drafter_packing._groups(IN_ORDER, 40, lengths) == [[0], [1], [2, 3], [4]]
    assert drafter_packing._groups(SORTED, 40, lengths) == [[1], [4], [3, 2, 0]]


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_all_forms_have_the_packed_gradients(kind: Kind, tmp_path: Path) -> None:
    arguments = arguments_of("--samples", "7", "--longest", "60", "--bounds", "80", "200", "--batches", "3", "7")
    target = write_tiny_model("qwen2-untied", tmp_path, num_hidden_layers=3, vocab_size=drafter_packing.VOCAB)
    trainers = drafter_packing._trainers(target, kind, arguments)
    width = trainers[PACKED, 80].model.entry_size
    entries = drafter_packing._entries(7, 60, width)
    expected = drafter_packing._gradients(trainers[PACKED, 80], entries)
    assert len(trainers) == 8 and min(float(gradient.norm()) for gradient in expected) > 0
    for case, trainer in trainers.items():
        found = drafter_packing._gradients(trainer, entries)
        assert drafter_packing._difference(found, expected) < 1e-5, case
    longest = max(entry.length for entry in entries)
    assert drafter_packing._positions(trainers[WHOLE, 7], entries) == 7 * (longest - 2)
    assert drafter_packing._positions(trainers[PACKED, 80], entries) == sum(entry.length - 2 for entry in entries)

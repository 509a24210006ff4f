"""The drafter grid benchmark: which points it has, and that each gets its seconds and no more."""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import torch

from megatron_tlt.bench import drafter_grid
from megatron_tlt.bench.tiny_models import write_tiny_model
from megatron_tlt.drafter import DrafterTrainer, Entry, drafter_from_target


def arguments_of(*values: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    drafter_grid.add_arguments(parser)
    return parser.parse_args(values)


def test_an_eagle_head_has_the_whole_vocabulary_only() -> None:
    arguments = arguments_of("--rates", "1e-3", "--unrolls", "1", "3", "--losses", "kl", "--vocabularies", "0", "48")
    points = [(name["kind"], name["draft_vocab_size"], name["unroll_steps"]) for name, _ in _grid(arguments)]
    assert points == [
        ("eagle", None, 1),
        ("eagle", None, 3),
        ("eagle3", None, 1),
        ("eagle3", None, 3),
        ("eagle3", 48, 1),
        ("eagle3", 48, 3),
    ]


def _grid(arguments: argparse.Namespace) -> list[tuple[dict[str, object], object]]:
    return [(name, config) for name, config in drafter_grid._grid(arguments, 2048)]


def test_an_arm_trains_for_its_seconds_and_keeps_what_came_of_them(tmp_path: Path) -> None:
    target = write_tiny_model("qwen2-untied", tmp_path, num_hidden_layers=3, vocab_size=64)
    arguments = arguments_of("--kinds", "eagle3", "--rates", "1e-3", "--unrolls", "1", "--vocabularies", "48")
    name, config = drafter_grid._grid(arguments, 2048)[0]
    model = drafter_from_target(target, "eagle3", 1, draft_vocab_size=48)
    arm = drafter_grid._GridArm(name, DrafterTrainer(model, config, 1))
    generator = torch.Generator().manual_seed(1)
    entries = []
    for i in range(4):
        tokens = torch.randint(0, 64, (20,), generator=generator, dtype=torch.int32)
        entries.append(Entry(f"0/{i}", 0, tokens, 4, torch.randn(20, model.entry_size, generator=generator), 1.0))
    arm.train(entries, 2, 0.1, random.Random(1))
    arm.evaluate(entries[:1], 3)
    until_s = arm.history[0][0] + 0.1  # a slow step may have taken the arm far beyond the first limit
    arm.train(entries, 2, until_s, random.Random(1))
    arm.evaluate(entries[:1], 3)
    first, second = arm.history
    assert 0.1 <= first[0] < until_s <= second[0]
    assert 0 < first[1] < second[1] == arm.trainer.version
    assert all(1.0 <= length <= 4.0 for _, _, length in arm.history)

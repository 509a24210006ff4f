"""The data of a run's drafter: who reads it back. One process; the target's tensors come from its folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from megatron_tlt.actor.policy import Policy
from megatron_tlt.config.loader import load_config
from megatron_tlt.models.hf_folder import SafetensorsFolder
from megatron_tlt.trainer.drafter_manager import DrafterManager
from tests.config.test_loader import write
from tests.drafter.conftest import load_target, random_entry, write_target


class TensorsOfFolder:
    """What a drafter takes from the policy: its weights by name."""

    def __init__(self, folder: Path) -> None:
        self._tensors = SafetensorsFolder(folder)
        shapes = {name: tuple(self._tensors.read(name).shape) for name in self._tensors.names}
        self.model = SimpleNamespace(weights=SimpleNamespace(shapes=shapes, tied=False))

    def export_weights(self, names: Sequence[str]) -> list[tuple[str, torch.Tensor]]:
        return [(name, self._tensors.read(name)) for name in names]


def test_an_evaluation_says_nothing_of_data_that_it_does_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = write_target("qwen2-untied", tmp_path / "target")
    overrides = ["drafter.kind=eagle", "speculation.drafter=eagle"]
    config = load_config(write(tmp_path), overrides, check_libraries=False)
    policy = cast("Policy", TensorsOfFolder(target))
    run, checkpoint = tmp_path / "run", tmp_path / "checkpoint"

    def drafting(read_only: bool) -> DrafterManager:
        return DrafterManager(config, target, run, policy, read_only=read_only)

    trained = drafting(read_only=False)
    model = load_target(target)
    for seed in range(3):
        trained.buffer.add(random_entry(model, "eagle", 9, 3, seed))
    checkpoint.mkdir()
    trained.save(checkpoint)
    evaluated = drafting(read_only=True)
    evaluated.load([checkpoint])
    assert len(evaluated.buffer) == 0
    assert "are missing" not in capsys.readouterr().err
    for file in (run / "drafter" / "data-00000").glob("*.entry"):
        file.unlink()
    drafting(read_only=False).load([checkpoint])
    assert "3 responses that the checkpoint refers to" in capsys.readouterr().err

"""``tlt export-drafter``: a warm-up's checkpoint becomes the folder that vLLM loads; other folders are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_tlt.checkpoint.manifest import write_manifest
from megatron_tlt.cli import main
from megatron_tlt.config.drafter import DrafterConfig
from megatron_tlt.drafter import DrafterTrainer, drafter_from_target, save_drafter, write_checkpoint
from megatron_tlt.drafter.model import Kind


def checkpoint(target: Path, folder: Path, kind: Kind = "eagle") -> DrafterTrainer:
    trainer = DrafterTrainer(drafter_from_target(target, kind, seed=1), DrafterConfig(kind=kind), seed=0)
    write_checkpoint(folder, trainer.model, trainer.state, {})
    return trainer


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_checkpoint_and_a_folder_become_the_same_folder(kind: Kind, target_folder: Path, tmp_path: Path) -> None:
    trainer = checkpoint(target_folder, tmp_path / "training", kind)
    save_drafter(trainer.model, tmp_path / "folder")
    save_drafter(trainer.model, tmp_path / "run" / "drafter" / "newest")
    for source in ("training", "folder", "run"):
        assert main(["export-drafter", str(tmp_path / source), str(tmp_path / f"of-{source}")]) == 0
        for file in ("config.json", "model.safetensors"):
            assert (tmp_path / f"of-{source}" / file).read_bytes() == (tmp_path / "folder" / file).read_bytes()
        names = sorted(file.name for file in (tmp_path / f"of-{source}").iterdir())
        assert names == ["config.json", "manifest.json", "model.safetensors"]


def test_the_requested_dtype_is_written(target_folder: Path, tmp_path: Path) -> None:
    trainer = checkpoint(target_folder, tmp_path / "training")
    assert main(["export-drafter", str(tmp_path / "training"), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    for name, tensor in load_file(tmp_path / "out" / "model.safetensors").items():
        assert torch.equal(tensor, trainer.state.parameters[name].bfloat16()), name


def refused(source: Path, target: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["export-drafter", str(source), str(target)]) == 2
    assert not target.exists() or target == source
    return capsys.readouterr().err


def test_a_folder_without_a_drafter_is_refused(
    target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert "no such folder" in refused(tmp_path / "nowhere", out, capsys)
    (tmp_path / "empty").mkdir()
    assert "empty: no config.json in it" in refused(tmp_path / "empty", out, capsys)
    assert "architectures is ['Qwen2ForCausalLM'], which is no drafter" in refused(target_folder, out, capsys)
    assert "exists already" in refused(target_folder, target_folder, capsys)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2; a drafter has 1"),
        ({"attention_bias": True}, "attention_bias is True; allowed: false"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "no tensor 'fc.weight'|shape (64, 128); allowed: (64, 192)"),
        ({"intermediate_size": 96}, "'layers.0.mlp.gate_proj.weight' has shape (128, 64); allowed: (96, 64)"),
    ],
)
def test_a_config_of_another_model_is_refused(
    options: dict[str, Any], message: str, target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint(target_folder, tmp_path / "training")
    file = tmp_path / "training" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | options))
    error = refused(tmp_path / "training", tmp_path / "out", capsys)
    assert any(part in error for part in message.split("|")), error


def test_tensors_that_are_missing_or_not_finite_are_named(
    target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = checkpoint(target_folder, tmp_path / "training")
    folder, out = tmp_path / "folder", tmp_path / "out"
    save_drafter(trainer.model, folder)
    (folder / "manifest.json").unlink()
    weights = load_file(folder / "model.safetensors")
    fc = weights.pop("fc.weight")
    save_file(weights, folder / "model.safetensors")
    assert "no tensor 'fc.weight'; a drafter of kind eagle has it" in refused(folder, out, capsys)
    save_file(weights | {"fc.weight": fc * float("nan")}, folder / "model.safetensors")
    assert "tensor 'fc.weight' has entries that are not finite" in refused(folder, out, capsys)
    (folder / "model.safetensors").unlink()
    assert "neither training.safetensors nor model.safetensors in it" in refused(folder, out, capsys)
    save_file({"x": fc}, tmp_path / "training" / "training.safetensors")
    assert "training.safetensors: its format is None" in refused(tmp_path / "training", out, capsys)


@pytest.mark.parametrize("source", ["training", "folder"])
def test_a_manifest_detects_a_flipped_bit(
    source: str, target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = checkpoint(target_folder, tmp_path / "training")
    save_drafter(trainer.model, tmp_path / "folder")
    write_manifest(tmp_path / "training")
    (file,) = (tmp_path / source).glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-100] ^= 64
    file.write_bytes(data)
    assert main(["export-drafter", str(tmp_path / source), str(tmp_path / "out")]) == 1
    assert f"{file}: SHA-256 differs" in capsys.readouterr().err and not (tmp_path / "out").exists()
    (tmp_path / source / "manifest.json").unlink()
    assert main(["export-drafter", str(tmp_path / source), str(tmp_path / "out")]) == 0
    assert f"note: {tmp_path / source} has no manifest.json" in capsys.readouterr().err

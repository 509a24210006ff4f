"""What a Hugging Face folder says when it is not whole, and that parts are read as they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_tlt.bench.tiny_models import write_tiny_model
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.hf_folder import INDEX, SafetensorsFolder, copy_side_files, read_hf_config
from megatron_tlt.models.weight_map import WeightMap


def test_parts_are_read_along_either_axis_in_their_own_type(tmp_path: Path) -> None:
    whole = torch.arange(12, dtype=torch.bfloat16).view(3, 4)
    save_file({"a": whole}, tmp_path / "model.safetensors")
    folder = SafetensorsFolder(tmp_path)
    assert torch.equal(folder.read("a"), whole)
    assert torch.equal(folder.read("a", 0, 1, 2), whole[1:])
    assert torch.equal(folder.read("a", 1, 2, 1), whole[:, 2:3])
    assert folder.shape("a") == (3, 4) and folder.dtype("a") == torch.bfloat16 and "b" not in folder


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), "no *.safetensors in it"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 40), "weights cannot be read"),
        (lambda folder: (folder / INDEX).write_text("{}"), "weights cannot be read: KeyError: 'weight_map'"),
        (
            lambda folder: (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": "gone"}})),
            "no tensor 'model.embed_tokens.weight'",
        ),
    ],
)
def test_a_folder_that_is_not_whole_says_what_is_wrong(
    damage: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    folder = write_tiny_model("llama", tmp_path / "model")
    weights = WeightMap(read_hf_config(folder))
    SafetensorsFolder(folder).check(weights)
    damage(folder)
    with pytest.raises(ConfigError) as error:
        SafetensorsFolder(folder).check(weights)
    assert str(folder) in str(error.value) and message in str(error.value)


def test_a_truncated_file_and_a_missing_one_are_named(tmp_path: Path) -> None:
    folder = write_tiny_model("llama", tmp_path / "model")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="weights cannot be read"):
        SafetensorsFolder(folder)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": "gone.safetensors"}}))
    with pytest.raises(ConfigError, match=r"gone\.safetensors: model\.norm\.weight cannot be read"):
        SafetensorsFolder(folder).read("model.norm.weight")


def test_a_config_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read"):
        read_hf_config(tmp_path)


def test_side_files_are_all_that_holds_no_weights(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir(), target.mkdir()
    for name in ("config.json", "tokenizer.model", INDEX, "model.safetensors", "pytorch_model.bin", ".hidden"):
        (source / name).write_text("x")
    copy_side_files(source, target)
    assert sorted(file.name for file in target.iterdir()) == ["config.json", "tokenizer.model"]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"{name}_scale_inv": torch.ones(1, 1)}, "tensor '{name}_scale_inv' belongs to quantized '{name}'"),
        ({"{name}.absmax": torch.ones(4)}, "tensor '{name}.absmax' belongs to quantized '{name}'"),
        ({"{name}": torch.float8_e4m3fn}, "tensor '{name}' is F8_E4M3"),
        ({"{name}": torch.int8}, "tensor '{name}' is I8"),
    ],
)
def test_quantized_weights_are_refused_by_tensor(
    tensors: dict[str, torch.Tensor | torch.dtype], message: str, tmp_path: Path
) -> None:
    folder = write_tiny_model("llama", tmp_path / "model")
    name = "model.layers.0.mlp.down_proj.weight"
    stored = load_file(folder / "model.safetensors")
    for key, value in tensors.items():
        tensor = stored[name].to(value) if isinstance(value, torch.dtype) else value
        stored[key.format(name=name)] = tensor
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(ConfigError) as error:
        SafetensorsFolder(folder).check(WeightMap(read_hf_config(folder)))
    assert f"{folder}: {message.format(name=name)}" in str(error.value)


def test_quantized_config_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_model("llama", tmp_path / "model")
    file = folder / "config.json"
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": quantization}))
    with pytest.raises(ConfigError, match=r"config\.json: quantization_config is 'fp8'; allowed: "):
        read_hf_config(folder)


def test_manifest_is_no_side_file(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "out").mkdir()
    copy_side_files(tmp_path, tmp_path / "out")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["config.json"]

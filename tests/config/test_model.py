"""Launch configs that are shipped, and the two descriptions that a model may have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_tlt.bench.tiny_models import write_tiny_model
from megatron_tlt.config.loader import load_config
from megatron_tlt.config.model import architecture_file, read_model, require_model_folder
from megatron_tlt.errors import ConfigError
from tests.config.test_loader import violations, write
from tests.helpers.launch import REPOSITORY

SIZES = {
    "model_type": "qwen2",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 1024,
}


def described(path: Path, **changes: object) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({**SIZES, **changes}))
    return path


@pytest.mark.parametrize("file", sorted((REPOSITORY / "launch").glob("*.yaml")), ids=lambda file: file.stem)
def test_every_launch_config_is_valid(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    fetched = "smollm2" in file.stem  # its model is fetched by a tool: another stands for it
    base = [f"model.recipe.base={write_tiny_model('llama', tmp_path, max_position_embeddings=512)}"] if fetched else []
    config = load_config(file, base)
    assert config.run.name.partition("+")[0] in (file.stem, file.stem.removesuffix("-cpu"))


def test_the_large_model_is_what_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_tlt.models.architecture import sizes_of
    from megatron_tlt.models.weight_map import WeightMap

    monkeypatch.chdir(REPOSITORY)
    config = load_config("launch/qwen2.5-32b-8n8g.yaml", check_libraries=False)
    weights = WeightMap(*sizes_of(config))
    assert weights.num_parameters == 32_763_876_352  # as its model card has it, 32.76 B
    with pytest.raises(ConfigError, match=r"model\.path: no folder models/Qwen2\.5-32B; allowed: a Hugging Face"):
        require_model_folder(config)


def test_either_description_is_enough_for_checks(tmp_path: Path) -> None:
    file, folder = described(tmp_path / "arch.json"), tmp_path / "model"
    alone = load_config(write(tmp_path, model={"architecture": str(file)}), check_libraries=False)
    assert read_model(alone)[1] == str(file)
    absent = write(tmp_path, model={"architecture": str(file), "path": str(folder)})
    assert architecture_file(load_config(absent, check_libraries=False)) == file
    described(folder / "config.json")
    there = load_config(absent, check_libraries=False)
    assert architecture_file(there) == folder / "config.json"
    require_model_folder(there)
    (line,) = violations(absent, "rollout.max_response_tokens=2000")
    assert "at most max_position_embeddings = 1024" in line


def test_descriptions_that_disagree_are_an_error_with_both_values(tmp_path: Path) -> None:
    file = described(tmp_path / "arch.json", vocab_size=66, num_hidden_layers=5)
    folder = described(tmp_path / "model" / "config.json").parent
    lines = violations(write(tmp_path, model={"architecture": str(file), "path": str(folder)}))
    assert len(lines) == 2
    assert f"model.architecture: num_hidden_layers is 5 in {file}, but 4 in {folder / 'config.json'}" in lines[0]
    assert "vocab_size is 66" in lines[1]


def test_a_model_is_described_once_and_readably(tmp_path: Path) -> None:
    file = tmp_path / "arch.json"
    (line,) = violations(write(tmp_path, model={"recipe": {}, "architecture": str(file)}))
    assert "give exactly one of model.path (or model.architecture, for plans) and model.recipe" in line
    only = write(tmp_path, model={"architecture": str(file)})
    assert f"model.architecture: no file {file}" in violations(only)[0]
    file.write_text("{")
    assert f"model.architecture: {file} cannot be read" in violations(only)[0]
    file.write_text("[]")
    assert f"model.architecture: {file} is not a JSON object" in violations(only)[0]

"""The model architecture of a launch config, and the file that describes it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_tlt.config.schema import TltConfig
from megatron_tlt.errors import ConfigError

RECIPE_ARCHITECTURE = "model.recipe.architecture"
# If both the model's folder and model.architecture have one of these keys, the values must agree.
_COMPARED = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "tie_word_embeddings",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
)


def architecture_file(config: TltConfig) -> Path | None:
    """The ``config.json`` that describes the model: its folder's, else ``model.architecture``.

    None for a recipe without ``base``.

    Raises:
        ConfigError: neither exists, or the two disagree.
    """
    model = config.model
    if model.recipe is not None:
        return None if model.recipe.base is None else _folder_file(model.recipe.base, "model.recipe.base")
    if model.path is None or (model.architecture is not None and not model.path.is_dir()):
        assert model.architecture is not None
        _read(model.architecture, "model.architecture")
        return model.architecture
    file = _folder_file(model.path, "model.path")
    if model.architecture is not None and (found := list(_disagreements(file, model.architecture))):
        raise ConfigError("\n".join(found))
    return file


def read_model(config: TltConfig) -> tuple[dict[str, Any], str]:
    """The architecture in the form of a config.json, and the file or key that defines it.

    Raises:
        ConfigError: as ``architecture_file``; or a file cannot be read.
    """
    file, recipe = architecture_file(config), config.model.recipe
    if file is None:
        assert recipe is not None
        return recipe.architecture.model_dump(), RECIPE_ARCHITECTURE
    if recipe is not None:
        return _read(file, "model.recipe.base"), str(file)
    return _read(file, "model.path" if file != config.model.architecture else "model.architecture"), str(file)


def require_model_folder(config: TltConfig) -> None:
    """Checks for the model folder, whose weights and tokenizer training and evaluation need.

    Raises:
        ConfigError: the config names no model folder, or the folder does not exist.
    """
    if config.model.recipe is not None or (config.model.path is not None and config.model.path.is_dir()):
        return
    found = "no value" if config.model.path is None else f"no folder {config.model.path}"
    raise ConfigError(
        f"model.path: {found}; allowed: a Hugging Face model folder or a Megatron checkpoint "
        "(model.architecture alone is enough for `tlt plan` only)"
    )


def _folder_file(path: Path, key: str) -> Path:
    if not path.is_dir():
        other = " or a Megatron checkpoint" if key == "model.path" else ""
        raise ConfigError(f"{key}: no folder {path}; allowed: a Hugging Face model folder{other}")
    file = path / "config.json"
    if not file.is_file() and key == "model.path" and (path / "hf" / "config.json").is_file():  # a Megatron checkpoint
        file = path / "hf" / "config.json"
    if not file.is_file():
        raise ConfigError(f"{key}: no config.json in {path}; allowed: a Hugging Face model folder")
    return file


def _read(file: Path, key: str) -> dict[str, Any]:
    try:
        model = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{key}: no file {file}; allowed: a Hugging Face config.json") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}: {file} cannot be read: {error}") from error
    if not isinstance(model, dict):
        raise ConfigError(f"{key}: {file} is not a JSON object")
    return model


def _disagreements(file: Path, architecture: Path) -> Iterator[str]:
    actual, described = _read(file, "model.path"), _read(architecture, "model.architecture")
    for key in _COMPARED:
        if key in actual and key in described and actual[key] != described[key]:
            yield (
                f"model.architecture: {key} is {described[key]!r} in {architecture}, but {actual[key]!r} in {file}; "
                "allowed: the same value"
            )

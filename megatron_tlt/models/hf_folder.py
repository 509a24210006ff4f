"""A Hugging Face model folder: its config, its weights read slice by slice, and the small files beside them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from megatron_tlt.errors import ConfigError
from megatron_tlt.models.families import family_of
from megatron_tlt.models.weight_map import WeightMap

if TYPE_CHECKING:
    from transformers import PretrainedConfig

INDEX = "model.safetensors.index.json"
# A Megatron checkpoint, converted or a run's: Megatron-Core's part, and the small files of its Hugging Face folder.
MEGATRON_PART = "actor"
SIDE_FILES = "hf"


def is_megatron_checkpoint(folder: Path) -> bool:
    """Whether a folder holds weights as a Megatron distributed checkpoint rather than as safetensors."""
    return (folder / MEGATRON_PART / "metadata.json").is_file()


def side_files_of(folder: Path) -> Path:
    """Where the config and tokenizer of a model folder of either kind are."""
    return folder / SIDE_FILES if is_megatron_checkpoint(folder) else folder


def read_hf_config(folder: Path) -> PretrainedConfig:
    """The architecture a Hugging Face folder describes.

    Raises:
        ConfigError: no such folder, no ``config.json``, or an architecture that is not supported.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise ConfigError(f"model.path: no config.json in {folder}; a Hugging Face model folder is needed")
    return read_architecture(file, str(folder))


def read_architecture(file: Path, where: str) -> PretrainedConfig:
    """The architecture that a ``config.json`` describes, whatever its name.

    Args:
        file: the file.
        where: what errors about its options name.

    Raises:
        ConfigError: it cannot be read, or is of an architecture that is not supported.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(file)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{file}: cannot be read: {next(iter(str(error).splitlines()), '')}") from error
    family_of(config, where)
    return config


def copy_side_files(source: Path, target: Path) -> None:
    """Copies config, tokenizer and generation config: every file of the folder that holds no weights."""
    for file in sorted(source.iterdir()):
        weights = file.suffix in (".safetensors", ".bin", ".pth", ".pt", ".gguf") or file.name.endswith(".index.json")
        if file.is_file() and not weights and not file.name.startswith("."):
            shutil.copyfile(file, target / file.name)


class SafetensorsFolder:
    """The weights of a Hugging Face folder, read slice by slice.

    Raises:
        ConfigError: no safetensors file, or an index that cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._opened: dict[Path, Any] = {}
        index = folder / "model.safetensors.index.json"
        try:
            if index.is_file():
                named = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                self._files = {name: folder / file for name, file in named.items()}
            else:
                self._files = {
                    name: file for file in sorted(folder.glob("*.safetensors")) for name in self._names(file)
                }
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise ConfigError(f"{folder}: weights cannot be read: {type(error).__name__}: {error}") from error
        if not self._files:
            raise ConfigError(f"{folder}: no *.safetensors in it; a Hugging Face model folder is needed")

    @staticmethod
    def _names(file: Path) -> list[str]:
        with safe_open(file, "pt") as opened:
            return list(opened.keys())

    def __contains__(self, name: str) -> bool:
        return name in self._files

    @property
    def names(self) -> list[str]:
        """Of all tensors, sorted."""
        return sorted(self._files)

    def _slice(self, name: str) -> Any:
        """A tensor that is not read yet. Files stay open: reading the names of thousands of tensors takes a while."""
        if name not in self._files:
            raise ConfigError(f"{self.folder}: no tensor {name!r} in its safetensors files")
        file = self._files[name]
        try:
            if file not in self._opened:
                self._opened[file] = safe_open(file, "pt").__enter__()
            return self._opened[file].get_slice(name)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{file}: {name} cannot be read: {error}") from error

    def read(self, name: str, dim: int = 0, start: int = 0, length: int | None = None) -> torch.Tensor:
        """Entries ``start .. start + length`` of a tensor along ``dim``; only they are read.

        Raises:
            ConfigError: no such tensor, or its file is damaged.
        """
        part = self._slice(name)
        stop = part.get_shape()[dim] if length is None else start + length
        try:
            found: torch.Tensor = part[tuple([slice(None)] * dim + [slice(start, stop)])]
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{self._files[name]}: {name} cannot be read: {error}") from error
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises ConfigError as :meth:`read` does."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Raises ConfigError as :meth:`read` does."""
        return self.read(name, 0, 0, 0).dtype

    def check(self, weights: WeightMap) -> None:
        """Whether every tensor of the model is there in its shape.

        Raises:
            ConfigError: what is missing, else what has another shape, one line each (up to ten).
        """
        wrong = [f"{self.folder}: no tensor {name!r}" for name in weights.shapes if name not in self]
        wrong = wrong or [
            f"{self.folder}: tensor {name!r} has shape {self.shape(name)}; config.json asks for {shape}"
            for name, shape in weights.shapes.items()
            if self.shape(name) != shape
        ]
        if wrong:
            raise ConfigError("\n".join(wrong[:10]))

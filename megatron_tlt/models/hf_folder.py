"""A Hugging Face model folder: its config, its weights read slice by slice, and the small files beside them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from safetensors import SafetensorError, safe_open

from megatron_tlt.errors import ConfigError
from megatron_tlt.models.families import family_of
from megatron_tlt.models.weight_map import WeightMap

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

INDEX = "model.safetensors.index.json"
_MANIFEST = "manifest.json"  # lists the folder's own files (checkpoint/manifest.py)
# A Megatron checkpoint (converted or of a run): Megatron-Core's part, and the small files of its Hugging Face folder.
MEGATRON_PART = "actor"
SIDE_FILES = "hf"
# "x.weight_scale_inv" (FP8), "x.weight.absmax" (bitsandbytes). With packed weights (GPTQ) there is no "x.weight".
_PART_OF_WEIGHT = re.compile(r"(.+\.weight)[._].+")
_PLAIN_TYPES = ("F64", "F32", "F16", "BF16")


def is_megatron_checkpoint(folder: Path) -> bool:
    """Whether a folder holds weights as a Megatron distributed checkpoint rather than as safetensors."""
    return (folder / MEGATRON_PART / "metadata.json").is_file()


def side_files_of(folder: Path) -> Path:
    """The folder of config and tokenizer, for a model folder of either kind."""
    return folder / SIDE_FILES if is_megatron_checkpoint(folder) else folder


def read_hf_config(folder: Path) -> PretrainedConfig:
    """Reads the architecture of a Hugging Face folder.

    Raises:
        ConfigError: no such folder, no ``config.json``, an unsupported architecture, or quantized weights.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise ConfigError(f"model.path: no config.json in {folder}; a Hugging Face model folder is needed")
    config = read_architecture(file, str(folder))
    quantization = getattr(config, "quantization_config", None)
    if quantization:
        method = quantization.get("quant_method", quantization) if isinstance(quantization, dict) else quantization
        raise ConfigError(f"{file}: quantization_config is {method!r}; allowed: weights that are not quantized")
    return config


def read_architecture(file: Path, where: str) -> PretrainedConfig:
    """Reads the architecture in a ``config.json``, under any file name.

    Raises:
        ConfigError: it is unreadable, or of an unsupported architecture; names ``where`` as the source.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(file)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{file}: cannot be read: {next(iter(str(error).splitlines()), '')}") from error
    family_of(config, where)
    return config


def copy_side_files(source: Path, target: Path) -> None:
    """Copies config, tokenizer and generation config: all files of the folder except weights and its manifest."""
    for file in sorted(source.iterdir()):
        weights = file.suffix in (".safetensors", ".bin", ".pth", ".pt", ".gguf") or file.name.endswith(".index.json")
        if file.is_file() and not weights and not file.name.startswith(".") and file.name != _MANIFEST:
            shutil.copyfile(file, target / file.name)


class SafetensorsFolder:
    """The weights of a Hugging Face folder, read slice by slice.

    The framework ``np`` is enough for names and shapes, and does not import torch; reading tensors needs ``pt``. Raises
    ConfigError if there is no safetensors file, or the index is unreadable.
    """

    def __init__(self, folder: Path, framework: Literal["pt", "np"] = "pt") -> None:
        self.folder = folder
        self._framework = framework
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

    def _names(self, file: Path) -> list[str]:
        with safe_open(file, self._framework) as opened:
            return list(opened.keys())

    def __contains__(self, name: str) -> bool:
        return name in self._files

    @property
    def names(self) -> list[str]:
        """Names of all tensors, sorted."""
        return sorted(self._files)

    def _slice(self, name: str) -> Any:
        """A tensor that is not read yet. Files stay open: reading thousands of tensor names takes time."""
        if name not in self._files:
            raise ConfigError(f"{self.folder}: no tensor {name!r} in its safetensors files")
        file = self._files[name]
        try:
            if file not in self._opened:
                self._opened[file] = safe_open(file, self._framework).__enter__()
            return self._opened[file].get_slice(name)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{file}: {name} cannot be read: {error}") from error

    def read(self, name: str, dim: int = 0, start: int = 0, length: int | None = None) -> torch.Tensor:
        """Reads only entries ``start .. start + length`` of a tensor along ``dim``.

        Raises:
            ConfigError: there is no such tensor, or its file is damaged.
        """
        part = self._slice(name)
        stop = part.get_shape()[dim] if length is None else start + length
        try:
            found: torch.Tensor = part[tuple([slice(None)] * dim + [slice(start, stop)])]
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{self._files[name]}: {name} cannot be read: {error}") from error
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises ConfigError like :meth:`read`."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Raises ConfigError like :meth:`read`."""
        return self.read(name, 0, 0, 0).dtype

    def check(self, weights: WeightMap) -> None:
        """Checks that every tensor of the model exists with its shape.

        Raises:
            ConfigError: tensors are missing, else of another shape, else quantized; one line each (at most ten).
        """
        wrong = [f"{self.folder}: no tensor {name!r}" for name in weights.shapes if name not in self]
        wrong = wrong or [
            f"{self.folder}: tensor {name!r} has shape {self.shape(name)}; config.json asks for {shape}"
            for name, shape in weights.shapes.items()
            if self.shape(name) != shape
        ]
        wrong = wrong or self._quantized(weights)
        if wrong:
            raise ConfigError("\n".join(wrong[:10]))

    def _quantized(self, weights: WeightMap) -> list[str]:
        """Tensors that scale or unpack a weight of the model, else weights of a type that needs such tensors."""
        allowed = "allowed: weights of 16 bits and more, without scales"
        found = [(name, _PART_OF_WEIGHT.fullmatch(name)) for name in self.names if name not in weights.shapes]
        wrong = [
            f"{self.folder}: tensor {name!r} belongs to quantized {match[1]!r}; {allowed}"
            for name, match in found
            if match is not None and match[1] in weights.shapes
        ]
        # dtypes as named in safetensors' header: checks without torch also call this
        types = {} if wrong else {name: str(self._slice(name).get_dtype()) for name in weights.shapes}
        return wrong + [
            f"{self.folder}: tensor {name!r} is {dtype}; {allowed}"
            for name, dtype in types.items()
            if dtype not in _PLAIN_TYPES
        ]

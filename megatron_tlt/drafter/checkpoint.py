"""A drafter's training checkpoint: its config and one file of tensors, from which training goes on bit for bit.

``config.json`` is the one of the folder that vLLM loads; ``training.safetensors`` holds trainable tensors and the
optimizer's, with version, numbers and whatever else its writer needs in its header. It is replaced as a whole.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from transformers import LlamaConfig

from megatron_tlt.drafter.folder import ARCHITECTURES, WEIGHTS, build_drafter, foreign_options, write_config
from megatron_tlt.drafter.model import DraftModel, Kind, SharedWeights
from megatron_tlt.drafter.state import TrainerState
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.hf_folder import SafetensorsFolder
from megatron_tlt.platform.files import atomic_write_bytes

STATE = "training.safetensors"
_FORMAT = "megatron_tlt.drafter.v1"


def write_checkpoint(folder: Path, model: DraftModel, state: TrainerState, extra: dict[str, Any]) -> None:
    """Writes a checkpoint over the one that is there, if any; ``extra`` is plain data of the caller's.

    Raises:
        RunError: the disk is full or the folder cannot be written; the checkpoint of before stays.
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.tensors().items()}
    header = {"version": state.version, "numbers": state.numbers, "extra": extra}
    write_config(model, folder, torch.float32)
    atomic_write_bytes(folder / STATE, save(tensors, metadata={"format": _FORMAT, "header": json.dumps(header)}))


def read_checkpoint(folder: Path) -> tuple[TrainerState, dict[str, Any]]:
    """The state in a checkpoint and what its writer put beside it.

    Raises:
        ConfigError: there is none, or its file cannot be read.
    """
    file = folder / STATE
    if not file.is_file():
        raise ConfigError(f"{folder}: no {STATE} in it; a drafter's training checkpoint is needed")
    try:
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata() or {}
            if metadata.get("format") != _FORMAT:
                raise ConfigError(f"{file}: its format is {metadata.get('format')!r}; allowed: {_FORMAT!r}")
            header = json.loads(metadata["header"])
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a dictionary
        return TrainerState.from_tensors(header["version"], tensors, header["numbers"]), header["extra"]
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ConfigError(f"{file}: cannot be read: {type(error).__name__}: {error}") from error


def _config(folder: Path) -> tuple[LlamaConfig, Kind]:
    file = folder / "config.json"
    if not file.is_file():
        raise ConfigError(f"{folder}: no config.json in it; a drafter's folder or training checkpoint is needed")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        found = values.get("architectures")
        for kind, architecture in ARCHITECTURES.items():
            if found == [architecture]:
                return LlamaConfig(**values), kind
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error
    allowed = " or ".join(f"[{architecture!r}] ({kind})" for kind, architecture in ARCHITECTURES.items())
    raise ConfigError(f"{file}: architectures is {found!r}, which is no drafter; allowed: {allowed}")


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    if (folder / STATE).is_file():
        return read_checkpoint(folder)[0].parameters
    if not (folder / WEIGHTS).is_file():
        raise ConfigError(f"{folder}: neither {STATE} nor {WEIGHTS} in it; a drafter has one of them")
    weights = SafetensorsFolder(folder)
    return {name: weights.read(name) for name in weights.names}


def load_without_target(folder: Path) -> DraftModel:
    """The drafter in a training checkpoint or a drafter's folder, for its weights alone: it cannot be run.

    Where a folder holds both, the checkpoint counts. An embedding (and, for EAGLE, an LM head) is passed over.

    Raises:
        ConfigError: what is there is no drafter; the file, key or tensor that says so is named.
    """
    config, kind = _config(folder)
    wrong = foreign_options(config)
    if config.num_hidden_layers != 1:
        wrong.append(f"num_hidden_layers is {config.num_hidden_layers}; a drafter has 1")
    if wrong:
        raise ConfigError("\n".join(f"{folder / 'config.json'}: {line}" for line in wrong))
    tensors = _tensors(folder)
    nothing = torch.empty(config.vocab_size, config.hidden_size, device="meta")
    model = build_drafter(config, kind, SharedWeights(nothing, nothing))
    for name, own in model.state_dict().items():
        found = tensors.get(name)
        if found is None:
            wrong.append(f"{folder}: no tensor {name!r}; a drafter of kind {kind} has it")
        elif found.shape != own.shape:
            wrong.append(f"{folder}: tensor {name!r} has shape {tuple(found.shape)}; allowed: {tuple(own.shape)}")
        elif not found.isfinite().all():
            wrong.append(f"{folder}: tensor {name!r} has entries that are not finite")
    if wrong:
        raise ConfigError("\n".join(wrong[:10]))
    model.load_state_dict({name: tensors[name].float() for name in model.state_dict()})
    return model

"""A drafter's training checkpoint: its config and one file of tensors, from which training continues bit for bit.

``config.json`` is that of the folder that vLLM loads. ``training.safetensors`` holds the trainable tensors and the
optimizer's state; its header holds the version, numbers and the writer's extra data. The file is replaced atomically.
A session's background checkpoints (``spot/checkpointer.py``) have the same content, from :func:`payload_of`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from megatron_tlt.checkpoint.payload import STATE, Payload, read_payload, write_payload
from megatron_tlt.checkpoint.weights import verify_weights
from megatron_tlt.config.drafter_kinds import KINDS, kind_of
from megatron_tlt.drafter.folder import (
    KIND_KEY,
    WEIGHTS,
    build_drafter,
    foreign_options,
    require_chosen,
    write_config,
)
from megatron_tlt.drafter.model import DraftModel, Kind, SharedWeights, as_dtype
from megatron_tlt.drafter.state import DrafterState
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.hf_folder import SafetensorsFolder
from megatron_tlt.platform.files import atomic_file

KIND = "megatron_tlt.drafter.v1"


def payload_of(state: DrafterState, extra: Mapping[str, Any]) -> Payload:
    """The checkpoint's content, with the live tensors; ``extra`` is plain data of the caller."""
    header = {"version": state.version, "numbers": state.numbers, "extra": dict(extra)}
    return Payload(KIND, header, state.tensors())


def state_of(payload: Payload) -> tuple[DrafterState, dict[str, Any]]:
    """The inverse of :func:`payload_of`.

    Raises:
        ConfigError: the header lacks a key.
    """
    header = payload.header
    try:
        return DrafterState.from_tensors(header["version"], dict(payload.tensors), header["numbers"]), header["extra"]
    except KeyError as error:
        raise ConfigError(f"its header has no {error}; a drafter's training state has it") from error


def write_checkpoint(folder: Path, model: DraftModel, state: DrafterState, extra: Mapping[str, Any]) -> None:
    """Write a checkpoint, replacing an existing one; ``extra`` is plain data of the caller.

    Raises:
        RunError: the disk is full or the folder cannot be written; the old checkpoint stays.
    """
    payload = payload_of(state, extra)
    on_host = {name: tensor.detach().cpu().contiguous() for name, tensor in payload.tensors.items()}
    write_config(model, folder, torch.float32)
    with atomic_file(folder / STATE, sum(tensor.nbytes for tensor in on_host.values())) as temporary:
        write_payload(temporary, replace(payload, tensors=on_host))


def read_checkpoint(folder: Path) -> tuple[DrafterState, dict[str, Any]]:
    """Read the state and the writer's extra data. The caller has verified the file.

    Raises:
        ConfigError: there is no checkpoint, or its file cannot be read.
    """
    file = folder / STATE
    if not file.is_file():
        raise ConfigError(f"{folder}: no {STATE} in it; a drafter's training checkpoint is needed")
    payload = read_payload(file, KIND)
    try:
        return state_of(payload)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def _config(folder: Path) -> tuple[LlamaConfig, Kind]:
    file = folder / "config.json"
    if not file.is_file():
        raise ConfigError(f"{folder}: no config.json in it; a drafter's folder or training checkpoint is needed")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        found = values.get("architectures")
        for name in [values[KIND_KEY]] if KIND_KEY in values else KINDS:
            if found == [kind_of(name).architecture]:
                return LlamaConfig(**values), name
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error
    allowed = " or ".join(f"[{kind.architecture!r}] ({name})" for name, kind in KINDS.items())
    raise ConfigError(f"{file}: architectures is {found!r}, which is no drafter; allowed: {allowed}")


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    if (folder / STATE).is_file():
        return read_checkpoint(folder)[0].parameters
    if not (folder / WEIGHTS).is_file():
        raise ConfigError(f"{folder}: neither {STATE} nor {WEIGHTS} in it; a drafter has one of them")
    weights = SafetensorsFolder(folder)
    return {name: weights.read(name) for name in weights.names}


def load_without_target(folder: Path) -> DraftModel:
    """Load the drafter of a training checkpoint or a drafter's folder, for its weights only: it cannot be run.

    The checkpoint takes precedence if a folder holds both. An embedding (and, for EAGLE, an LM head) is ignored.

    Raises:
        ConfigError: the folder is not a drafter's; the message names the file, key or tensor.
        RunError: the weights are damaged.
    """
    config, kind = _config(folder)
    verify_weights(folder)
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
    model.load_state_dict({name: as_dtype(tensors[name], torch.float32) for name in model.state_dict()})
    require_chosen(model, folder)
    return model

"""Reads the ``.metadata`` of a torch distributed checkpoint without running code that it might contain.

The file is a pickle, which torch loads without restrictions: a foreign checkpoint could run any code. This unpickler
accepts only the classes that such metadata needs.
"""

from __future__ import annotations

import pickle
from enum import Enum, EnumType
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from megatron_tlt.errors import ConfigError, RunError
from megatron_tlt.models.lora_weights import LORA_A

METADATA = ".metadata"
_KNOWN = {
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.planner": {"SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
}


def _enum_member(owner: object, name: str) -> Enum:
    """Stands for ``getattr``, by which Python before 3.11.4 pickles the members of an enumeration."""
    if isinstance(owner, EnumType) and name in owner.__members__:
        member: Enum = owner.__members__[name]
        return member
    raise pickle.UnpicklingError(f"names {name} of {owner}, which is not part of a checkpoint's metadata")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        if global_name == "getattr" and module_name in ("builtins", "__builtin__"):
            return _enum_member
        is_dtype = module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype)
        if is_dtype or global_name in _KNOWN.get(module_name, ()):
            return super().find_class(module_name, global_name)
        raise pickle.UnpicklingError(f"names {module_name}.{global_name}, which is not part of a checkpoint's metadata")


def refuse_adapters(folder: Path) -> None:
    """Refuses a checkpoint with LoRA adapters where the model's weights alone are read.

    Raises:
        ConfigError: it holds adapters.
        RunError: as :func:`read_metadata`.
    """
    if any(key.endswith(LORA_A) for key in read_metadata(folder).state_dict_metadata):
        raise ConfigError(
            f"{folder}: a checkpoint with LoRA adapters; allowed: the folder hf of its run, where they are merged"
        )


def read_metadata(folder: Path) -> Metadata:
    """Reads the metadata of the checkpoint in ``folder``.

    Raises:
        RunError: it is unreadable, or names other classes than those of metadata.
    """
    try:
        with open(folder / METADATA, "rb") as file:
            found = _Unpickler(file).load()
    except pickle.UnpicklingError as error:
        raise RunError(f"{folder}: not a readable checkpoint: {METADATA} {error}") from error
    except Exception as error:  # with damaged bytes the unpickler may raise any error
        reason = error.strerror if isinstance(error, OSError) else next(iter(str(error).splitlines()), "")
        kind = type(error).__name__
        raise RunError(f"{folder}: not a readable checkpoint: {METADATA}: {kind}: {reason}") from error
    if not isinstance(found, Metadata):
        raise RunError(f"{folder}: not a readable checkpoint: {METADATA} holds a {type(found).__name__}")
    return found

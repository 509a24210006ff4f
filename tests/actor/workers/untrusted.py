"""Puts code into each file of a Megatron checkpoint that is a pickle, loads it, and says whether the code ran."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from megatron_tlt.actor.megatron_checkpoint import load_policy, save_policy
from megatron_tlt.actor.megatron_convert import megatron_to_hf
from megatron_tlt.actor.megatron_weights import load_checkpoint_weights
from megatron_tlt.actor.policy import Policy
from megatron_tlt.config.schema import ActorConfig
from megatron_tlt.errors import TltError
from megatron_tlt.platform.device import initialize_distributed


class Code:
    """Unpickled it creates a folder."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.canary),)


def in_metadata(folder: Path, code: Code) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = code
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def in_common(folder: Path, code: Code) -> None:
    torch.save({"scheduler": code}, folder / "common.pt")


def _as_bytes(folder: Path, code: Code, key: str) -> None:
    """Makes an entry of the checkpoint one that is unpickled, and not a tensor."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    torch.save(code, folder / "code.distcp")
    metadata.state_dict_metadata[key] = BytesStorageMetadata()
    info = _StorageInfo("code.distcp", 0, (folder / "code.distcp").stat().st_size)
    metadata.storage_data = {index: i for index, i in metadata.storage_data.items() if index.fqn != key}
    metadata.storage_data[MetadataIndex(key)] = info
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def in_extra_state(folder: Path, code: Code) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    _as_bytes(folder, code, next(key for key in metadata.state_dict_metadata if "_extra_state" in key))


def in_a_tensor(folder: Path, code: Code) -> None:
    _as_bytes(folder, code, "embedding.word_embeddings.weight")


CASES: dict[str, Callable[[Path, Code], None]] = {
    "untouched": lambda folder, code: None,
    "metadata": in_metadata,
    "common": in_common,
    "extra_state": in_extra_state,
    "tensor": in_a_tensor,
}


def main(model: str, root: str) -> None:
    initialize_distributed()
    policy = Policy(Path(model), ActorConfig(transformer_impl="local"), seed=0)
    (Path(root) / "whole" / "actor").mkdir(parents=True)
    shutil.copytree(model, Path(root) / "whole" / "hf")
    save_policy(policy, Path(root) / "whole" / "actor")
    readers: dict[str, Callable[[Path], object]] = {
        "resume": lambda folder: load_policy(policy, folder / "actor"),
        "model.path": lambda folder: load_checkpoint_weights(policy.model.chunks, folder / "actor"),
        "convert": lambda folder: megatron_to_hf(folder, folder / "out"),
    }
    found = []
    for case, put in CASES.items():
        for reader, read in readers.items():
            folder = Path(root) / f"{case}-{reader}"
            shutil.copytree(Path(root) / "whole", folder)
            put(folder / "actor", Code(folder / "canary"))
            said = ""
            try:
                read(folder)
            except TltError as error:
                said = str(error)
            found.append({"case": case, "reader": reader, "said": said, "ran": (folder / "canary").exists()})
    Path(root, "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])

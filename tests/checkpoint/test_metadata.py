"""The metadata of a checkpoint is read without running code in it; real ones: tests/actor/test_untrusted.py."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItemType

from megatron_tlt.checkpoint.chunks import ChunkReader
from megatron_tlt.checkpoint.metadata import read_metadata
from megatron_tlt.errors import RunError


class Code:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.canary),)


def metadata(dtype: torch.dtype = torch.bfloat16) -> Metadata:
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))
    entry = TensorStorageMetadata(TensorProperties(dtype), torch.Size([4]), [chunk])
    return Metadata({"weight": entry}, storage_data={MetadataIndex("weight", torch.Size([0])): None})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_metadata_is_read(tmp_path: Path, dtype: torch.dtype, protocol: int) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata(dtype), protocol))
    assert read_metadata(tmp_path) == metadata(dtype)
    assert ChunkReader(tmp_path).dtype("weight") == dtype


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_code_is_refused_and_not_run(tmp_path: Path, protocol: int) -> None:
    found = metadata()
    found.planner_data = Code(tmp_path / "canary")
    (tmp_path / ".metadata").write_bytes(pickle.dumps(found, protocol))
    with pytest.raises(RunError, match=rf"{tmp_path}: not a readable checkpoint: \.metadata names posix\.mkdir"):
        ChunkReader(tmp_path)
    assert not (tmp_path / "canary").exists()


class AsAttribute:
    def __init__(self, owner: object, name: str) -> None:
        self.owner, self.name = owner, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.owner, self.name)


def test_members_of_enumerations_are_read_as_earlier_releases_of_python_wrote_them(tmp_path: Path) -> None:
    """Before 3.11.4 they are attributes of their class."""
    found = metadata()
    found.planner_data = AsAttribute(WriteItemType, "TENSOR")
    (tmp_path / ".metadata").write_bytes(pickle.dumps(found))
    assert read_metadata(tmp_path).planner_data is WriteItemType.TENSOR


@pytest.mark.parametrize(("owner", "name"), [(WriteItemType, "mro"), (Metadata, "__init__"), (torch.Size, "numel")])
def test_other_attributes_are_refused(owner: object, name: str, tmp_path: Path) -> None:
    found = metadata()
    found.planner_data = AsAttribute(owner, name)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(RunError, match=f"names {name} of .*, which is not part of a checkpoint's metadata"):
        read_metadata(tmp_path)


@pytest.mark.parametrize("data", [b"", b"\x80\x04", b"rubbish", pickle.dumps({"no": "metadata"})])
def test_what_is_no_metadata_is_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(data)
    with pytest.raises(RunError, match=rf"{tmp_path}: not a readable checkpoint: \.metadata") as error:
        ChunkReader(tmp_path)
    assert "\n" not in str(error.value)

"""Reads Megatron distributed checkpoints without executing code that they might contain.

Three of their parts are pickles. Megatron loads ``common.pt`` with torch's restricted unpickler, but ``.metadata`` and
non-tensor entries (Transformer Engine's extra state) without restrictions. This module checks the latter two first.
"""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from torch.distributed.checkpoint.planner import ReadItem

from megatron_tlt.checkpoint.metadata import read_metadata
from megatron_tlt.errors import RunError


class _CheckedPlanner(torch_strategy.MCoreLoadPlanner):
    """Megatron's planner; non-tensor entries must pass torch's restricted unpickler before they are loaded."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        try:
            torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise RunError(f"entry {read_item.dest_index.fqn!r} contains code; allowed: plain data") from error
        value.seek(0)
        super().load_bytes(read_item, value)


# Megatron's loading strategy takes no planner argument: it looks up this class in its module.
torch_strategy.MCoreLoadPlanner = _CheckedPlanner


def load_sharded(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """``dist_checkpointing.load`` for an untrusted folder; a collective over the world.

    Raises:
        RunError: metadata or ``common.pt`` is unreadable, or contains more than plain data.
    """
    with _plain_data(folder):
        loaded: dict[str, Any] = dist_checkpointing.load(state, str(folder))
    return loaded


def load_common(folder: Path) -> dict[str, Any]:
    """What an untrusted folder keeps once for all ranks; raises as :func:`load_sharded`."""
    with _plain_data(folder):
        common: dict[str, Any] = dist_checkpointing.load_common_state_dict(str(folder))
    return common


@contextlib.contextmanager
def _plain_data(folder: Path) -> Iterator[None]:
    read_metadata(folder)
    try:
        yield
    except pickle.UnpicklingError as error:
        raise RunError(f"{folder / COMMON_STATE_FNAME}: contains code or is damaged; allowed: plain data") from error

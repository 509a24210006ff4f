"""What a checkpoint holds beside the actor: each part writes a folder per rank and reads it back on resume."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol


class CheckpointPart(Protocol):
    """A piece of a run's state; every rank has its own object of each part."""

    @property
    def name(self) -> str:
        """The part's folder within a checkpoint."""

    def save(self, folder: Path) -> None:
        """Writes this rank's state into ``folder``, which is empty and its own; plain files, no collectives."""

    def load(self, folders: Sequence[Path]) -> None:
        """Takes the state back; ``folders`` has one for each rank of the run that saved, in their order.

        This run may have another number of ranks; a part that cannot be restored then says so in a warning.
        """


def save_parts(parts: Sequence[CheckpointPart], checkpoint: Path, rank: int) -> None:
    """Writes ``checkpoint/NAME/rank_NNNNN`` for every part."""
    for part in parts:
        folder = checkpoint / part.name / f"rank_{rank:05d}"
        folder.mkdir(parents=True)
        part.save(folder)


def load_parts(parts: Sequence[CheckpointPart], checkpoint: Path) -> list[str]:
    """Restores every part that ``checkpoint`` holds; a warning for each one that it does not."""
    warnings = []
    for part in parts:
        folders = sorted((checkpoint / part.name).glob("rank_*"))
        if folders:
            part.load(folders)
        else:
            warnings.append(f"checkpoint {checkpoint} holds no {part.name!r}: that part starts afresh")
    return warnings

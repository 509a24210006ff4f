"""Further parts of a checkpoint beside the actor: each writes a folder per rank and reads it on resume."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol


class CheckpointPart(Protocol):
    """A part of a run's state; every rank has its own object."""

    @property
    def name(self) -> str:
        """The part's folder within a checkpoint."""

    def save(self, folder: Path) -> None:
        """Writes this rank's state into its own empty ``folder``; plain files, no collectives."""

    def load(self, folders: Sequence[Path]) -> None:
        """Restores the state; ``folders`` has one for each rank of the run that saved, in rank order.

        If this run has another number of ranks, a part that cannot be restored gives a warning.
        """


def save_parts(parts: Sequence[CheckpointPart], checkpoint: Path, rank: int) -> None:
    """Writes ``checkpoint/NAME/rank_NNNNN`` for every part."""
    for part in parts:
        folder = checkpoint / part.name / f"rank_{rank:05d}"
        folder.mkdir(parents=True)
        part.save(folder)


def load_parts(parts: Sequence[CheckpointPart], checkpoint: Path) -> list[str]:
    """Restores every part that ``checkpoint`` holds; returns a warning for each missing one."""
    warnings = []
    for part in parts:
        folders = sorted((checkpoint / part.name).glob("rank_*"))
        if folders:
            part.load(folders)
        else:
            warnings.append(f"checkpoint {checkpoint} has no {part.name!r}: that part starts anew")
    return warnings

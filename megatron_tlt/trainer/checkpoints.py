"""A run's checkpoints: the actor's distributed checkpoint and the trainer's own state, published as one folder."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_tlt.actor.megatron_checkpoint import load_policy, save_policy
from megatron_tlt.actor.policy import Policy
from megatron_tlt.checkpoint.files import (
    atomic_folder,
    clean_leftovers,
    find_latest_whole,
    set_latest,
    write_manifest,
)
from megatron_tlt.errors import RunError
from megatron_tlt.platform.collectives import broadcast_data
from megatron_tlt.platform.device import barrier, log_once, rank


@dataclass
class TrainerState:
    """What a resumed run needs beyond the actor: how many steps are done, and evaluations by the step they followed."""

    step: int = 0
    evaluations: dict[str, dict[str, Any]] = field(default_factory=dict)


class Checkpoints:
    """Saves, finds and thins out checkpoints below ``root``; every method is a collective over the world."""

    def __init__(self, root: Path, keep: int) -> None:
        self._root = root
        self._keep = keep

    def save(self, policy: Policy, state: TrainerState) -> Path:
        """Writes ``step_NNNNNN`` whole or not at all, then points ``latest`` at it and removes the oldest.

        Raises:
            RunError: the disk is full or refuses to be written; the previous checkpoint stays.
        """
        folder = self._root / f"step_{state.step:06d}"
        if rank() == 0:
            self._root.mkdir(parents=True, exist_ok=True)
            with atomic_folder(folder) as temporary:
                (temporary / "actor").mkdir()
                self._save_actor(policy, broadcast_data(str(temporary), str))
                (temporary / "state.json").write_text(json.dumps(asdict(state), indent=1), encoding="utf-8")
                write_manifest(temporary)
            set_latest(self._root, folder.name)
            for old in sorted(self._root.glob("step_*"))[: -self._keep]:
                shutil.rmtree(old)
        else:
            self._save_actor(policy, broadcast_data(None, str))
        barrier()
        return folder

    @staticmethod
    def _save_actor(policy: Policy, temporary: str) -> None:
        save_policy(policy, Path(temporary) / "actor")
        barrier()

    def resume(self, policy: Policy) -> TrainerState:
        """Loads the newest whole checkpoint into ``policy``; the state of a fresh run where there is none.

        A damaged checkpoint is passed over with a warning for the one before it.

        Raises:
            RunError: checkpoints exist, but none of them is whole.
        """
        found: str | None = None
        if rank() == 0 and self._root.is_dir():
            clean_leftovers(self._root)
            path, warnings = find_latest_whole(self._root)
            for warning in warnings:
                log_once(f"warning: {warning}")
            if path is None and any(self._root.glob("step_*")):
                found = f"!{self._root}: none of its checkpoints is whole; move the folder away to start again"
            elif path is not None:
                found = str(path)
        found = broadcast_data(found, str | None)
        if found is None:
            return TrainerState()
        if found.startswith("!"):
            raise RunError(found[1:])
        load_policy(policy, Path(found) / "actor")
        return TrainerState(**json.loads((Path(found) / "state.json").read_text(encoding="utf-8")))

"""A run's checkpoints: the actor's distributed checkpoint and the run's own state, published as one folder."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from megatron_tlt.actor.megatron_checkpoint import POLL_S, begin_save, load_policy
from megatron_tlt.actor.megatron_writer import BackgroundWrite
from megatron_tlt.actor.policy import Policy
from megatron_tlt.checkpoint.files import clean_leftovers, find_latest_whole
from megatron_tlt.checkpoint.manifest import Sums, verify_manifest
from megatron_tlt.checkpoint.parts import CheckpointPart, load_parts, save_parts
from megatron_tlt.checkpoint.publication import Publication
from megatron_tlt.checkpoint.shared import run_together, with_shared_sums
from megatron_tlt.errors import RunError
from megatron_tlt.models.hf_folder import MEGATRON_PART, SIDE_FILES, copy_side_files
from megatron_tlt.platform.collectives import any_rank, broadcast_data, failing_together
from megatron_tlt.platform.device import rank, warn
from megatron_tlt.platform.files import write_errors

_STATE = "state.json"


@dataclass
class TrainerState:
    """What a resumed run needs beyond the actor.

    Attributes:
        step: how many are done.
        evaluations: by the step that they followed.
        evaluation_settings: of the ``evaluation`` section that they were made with; empty where nobody noted them.
        tokens_seen: prompt and response tokens trained on; 0 where an earlier release, which did not count, saved.
    """

    step: int = 0
    evaluations: dict[str, dict[str, Any]] = field(default_factory=dict)
    evaluation_settings: dict[str, Any] = field(default_factory=dict)
    tokens_seen: int = 0

    @classmethod
    def read(cls, folder: Path) -> TrainerState:
        """Of a checkpoint. What an earlier release did not write has its default.

        Raises:
            RunError: a newer release wrote more than this one knows, or it cannot be read.
        """
        path = folder / _STATE
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            unknown = sorted(values.keys() - {each.name for each in fields(cls)})
        except (OSError, ValueError, AttributeError) as error:
            raise RunError(f"{path}: cannot be read: {error}") from error
        if unknown:
            raise RunError(f"{path}: unknown {', '.join(unknown)}; a newer release may have written it")
        return cls(**values)


class Checkpoints:
    """Saves, finds and thins out checkpoints below ``root``; every method is a collective over the world.

    A save goes on while training does: ``save`` copies the state, ``poll`` and ``finish`` see it through. Each of these
    raises RunError, on all ranks, where the save fails; the previous checkpoint stays then, and so does ``latest``.

    Args:
        root: the folder of all checkpoints.
        keep: so many of them remain.
        parts: state beside the actor's.
        side_files: a folder with the model's config and tokenizer, to be kept with each checkpoint (``tlt convert``
            makes a Hugging Face folder of the two).
        in_background: False makes ``save`` wait until its checkpoint is published.
    """

    def __init__(
        self,
        root: Path,
        keep: int,
        parts: Sequence[CheckpointPart] = (),
        *,
        side_files: Path | None = None,
        in_background: bool = True,
    ) -> None:
        self._root = root
        self._keep = keep
        self._parts = parts
        self._side_files = side_files
        self._in_background = in_background
        self._began: float | None = None  # of the save in progress
        self._write: BackgroundWrite | None = None
        self._publication: Publication | None = None  # on rank 0
        self.published_s: float | None = None  # what the newest published save took, from its beginning

    def save(self, policy: Policy, state: TrainerState) -> None:
        """Starts to save ``step_NNNNNN``, which appears whole or not at all; the one before is finished first."""
        self.finish()
        folder = self._root / f"step_{state.step:06d}"
        self._began = time.perf_counter()
        with self._clearing_up():
            with failing_together():
                if rank() == 0:
                    self._publication = Publication(folder, self._keep)
            temporary = Path(broadcast_data(str(self._publication.temporary) if self._publication else None, str))
            with failing_together(), write_errors(folder):
                if rank() == 0:
                    (temporary / MEGATRON_PART).mkdir()
                    if self._side_files is not None:
                        (temporary / SIDE_FILES).mkdir()
                        copy_side_files(self._side_files, temporary / SIDE_FILES)
                    (temporary / _STATE).write_text(json.dumps(asdict(state), indent=1), encoding="utf-8")
                save_parts(self._parts, temporary, rank())
            self._write = begin_save(policy, temporary / MEGATRON_PART)
        if not self._in_background:
            self.finish()

    def poll(self) -> bool:
        """Takes the save in progress a step further, without waiting; whether none is in progress any more."""
        if self._began is None:
            return True
        with self._clearing_up():
            if self._write is not None:
                if not self._write.done():
                    return False
                self._write = None
                if self._publication is not None:
                    self._publication.start()
            with failing_together():
                published = self._publication is not None and self._publication.done()
            if not any_rank(published):
                return False
        self.published_s = time.perf_counter() - self._began
        self._began = self._publication = None
        return True

    def finish(self) -> None:
        """Waits until the save in progress, if any, is published."""
        while not self.poll():
            time.sleep(POLL_S)

    @contextlib.contextmanager
    def _clearing_up(self) -> Iterator[None]:
        """A failed save leaves nothing behind, and every rank says what rank 0 knows about it."""
        try:
            yield
        except RunError as error:
            last = self._publication.abandon(error) if self._publication is not None else error
            self._began = self._write = self._publication = None
            raise RunError(broadcast_data(str(last), str)) from error

    def resume(self, policy: Policy, *, sweep: bool = False) -> TrainerState:
        """Loads the newest whole checkpoint into ``policy``; the state of a fresh run where there is none.

        A damaged checkpoint is passed over with a warning for the one before it.

        Args:
            policy: of the same architecture, under any layout.
            sweep: first remove what killed processes left behind. For the run itself: who only reads its checkpoints
                changes nothing.

        Raises:
            RunError: checkpoints exist, but none of them is whole.
        """
        if sweep:
            run_together(lambda: clean_leftovers(self._root) if rank() == 0 else [])
        folder = self.find()
        return TrainerState() if folder is None else self.load(policy, folder)

    def load(self, policy: Policy, folder: Path) -> TrainerState:
        """Loads what :meth:`find` found. Of a checkpoint that no run wrote there is only the model.

        Raises:
            RunError: its state cannot be read.
        """
        load_policy(policy, folder / MEGATRON_PART)
        if not (folder / _STATE).is_file():
            return TrainerState()
        for warning in load_parts(self._parts, folder):
            warn(warning)
        return TrainerState.read(folder)

    def find(self, folder: Path | None = None) -> Path | None:
        """The newest whole checkpoint, or ``folder``, verified; None where there is no checkpoint yet.

        Raises:
            RunError: the folder is damaged, or checkpoints exist, but none of them is whole.
        """
        found = with_shared_sums(lambda sums: self._find(folder, sums), str | None)
        return None if found is None else Path(found)

    def _find(self, folder: Path | None, sums: Sums) -> str | None:
        if folder is None:
            return self._newest_whole(sums)
        problems = verify_manifest(folder, sums=sums)
        if problems:
            raise RunError(f"checkpoint {folder} is not whole: {problems[0]}")
        return str(folder)

    def _newest_whole(self, sums: Sums) -> str | None:
        path, warnings = find_latest_whole(self._root, sums=sums)
        for warning in warnings:
            warn(warning)
        if path is not None:
            return str(path)
        if any(self._root.glob("step_*")):
            why = f" ({warnings[0]})" if warnings else ""
            raise RunError(f"{self._root}: none of its checkpoints is whole{why}; move the folder away to start again")
        return None

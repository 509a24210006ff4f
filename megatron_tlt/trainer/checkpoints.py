"""A run's checkpoints: the actor's distributed checkpoint and the trainer's state, published as one folder."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_tlt.actor.megatron_checkpoint import POLL_S, begin_save, load_policy
from megatron_tlt.actor.megatron_writer import BackgroundWrite
from megatron_tlt.actor.policy import Policy
from megatron_tlt.checkpoint.files import find_latest_whole, latest_step
from megatron_tlt.checkpoint.leftovers import clean_leftovers
from megatron_tlt.checkpoint.manifest import Sums, verify_manifest
from megatron_tlt.checkpoint.parts import CheckpointPart, load_parts, save_parts
from megatron_tlt.checkpoint.publication import Publication, publication_threads
from megatron_tlt.checkpoint.shared import run_together, with_shared_sums
from megatron_tlt.checkpoint.verification import BackgroundVerification
from megatron_tlt.errors import RunError
from megatron_tlt.models.hf_folder import MEGATRON_PART, SIDE_FILES, copy_side_files
from megatron_tlt.platform.collectives import any_rank, broadcast_data, failing_together
from megatron_tlt.platform.device import rank, warn
from megatron_tlt.platform.files import write_errors

if TYPE_CHECKING:
    from megatron_tlt.trainer.snapshots import Snapshots

_STATE = "state.json"


@dataclass
class TrainerState:
    """What a resumed run needs besides the actor.

    Attributes:
        step: number of completed steps.
        evaluations: results, keyed by the step that they followed.
        evaluation_settings: the ``evaluation`` section that produced the results; empty if it was not recorded.
        tokens_seen: prompt and response tokens trained on; 0 in checkpoints of releases that did not count them.
        problems_drawn: index of the next training problem; None in checkpoints of releases without dynamic sampling,
            which drew the same number in each step.
        deferred: indices of problems that were drawn and left for later steps (``tail``, ``schedule``).
        curriculum: state of ``trainer.curriculum``; None without one.
        guard: state of ``guard``; None without one.
    """

    step: int = 0
    evaluations: dict[str, dict[str, Any]] = field(default_factory=dict)
    evaluation_settings: dict[str, Any] = field(default_factory=dict)
    tokens_seen: int = 0
    problems_drawn: int | None = None
    deferred: list[int] = field(default_factory=list)
    curriculum: dict[str, Any] | None = None
    guard: dict[str, Any] | None = None

    @classmethod
    def read(cls, folder: Path) -> TrainerState:
        """Reads the state of a checkpoint. Fields that an earlier release did not write get their defaults.

        Raises:
            RunError: the file cannot be read, or has fields that only a newer release knows.
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

    def with_problems_after(self, now: TrainerState, next_problem: int, deferred: Sequence[int]) -> TrainerState:
        """This state, to which a run returns from ``now``, with problems that it has not drawn.

        The curriculum counts drawn problems, so it stays as it is, with the pass rates of steps that are undone.
        """
        known = {step: found for step, found in now.evaluations.items() if int(step) <= self.step}
        return replace(
            self,
            evaluations=known,
            problems_drawn=next_problem,
            deferred=list(deferred),
            curriculum=now.curriculum,
        )


class Checkpoints:
    """Saves, finds and prunes checkpoints below ``root``; every method is a collective over the world.

    Training continues during a save: ``save`` copies the state, ``poll`` and ``finish`` complete the write. If a save
    fails, each of the three raises RunError on all ranks; the previous checkpoint and ``latest`` stay unchanged.

    Args:
        root: the folder of all checkpoints.
        keep: number of checkpoints to keep.
        parts: state saved in addition to the actor's.
        side_files: a folder with the model's config and tokenizer, copied into each checkpoint so that ``tlt convert``
            can make a Hugging Face folder of it.
        in_background: False makes ``save`` wait until its checkpoint is published.
        verify: rank 0 verifies each published checkpoint in the background (``checkpoint.verification``).
        read_only: nothing will be saved, so no threads are started for it.

    Raises:
        RunError: rank 0 cannot start the threads that publish and verify.
    """

    def __init__(
        self,
        root: Path,
        keep: int,
        parts: Sequence[CheckpointPart] = (),
        *,
        side_files: Path | None = None,
        in_background: bool = True,
        verify: bool = False,
        read_only: bool = False,
    ) -> None:
        self._root = root
        self._keep = keep
        self._parts = parts
        self._side_files = side_files
        self._in_background = in_background
        self._began: float | None = None  # start time of the save in progress
        self._write: BackgroundWrite | None = None
        self._publication: Publication | None = None  # on rank 0
        writes = rank() == 0 and not read_only
        self._threads = publication_threads() if writes else None
        self._verify = verify
        self._verification = BackgroundVerification() if verify and writes else None
        self._folder: Path | None = None  # of the newest save
        self.published_s: float | None = None  # seconds from start to publication of the newest published save
        self._verified: bool | None = None  # whether the newest verified checkpoint is intact

    def save(self, policy: Policy, state: TrainerState) -> None:
        """Starts to save ``step_NNNNNN``, which is published atomically; first finishes the previous save."""
        self.finish()
        self._folder = folder = self._root / f"step_{state.step:06d}"
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
        """Advances the save in progress without waiting; returns whether no save is in progress any more.

        Warns if a published checkpoint was found to be damaged.
        """
        self._poll_verification()
        if self._began is None:
            return True
        with self._clearing_up():
            if self._write is not None:
                if not self._write.done():
                    return False
                self._write = None
                if self._publication is not None and self._threads is not None:
                    self._publication.start(self._threads)
            with failing_together():
                published = self._publication is not None and self._publication.done()
            if not any_rank(published):
                return False
        self.published_s = time.perf_counter() - self._began
        self._began = self._publication = None
        if self._verification is not None and self._folder is not None:
            self._verification.start(self._folder)
        return True

    def finish(self) -> None:
        """Waits until the save in progress, if any, is published."""
        while not self.poll():
            time.sleep(POLL_S)

    def _poll_verification(self) -> None:
        problems = self._verification.poll() if self._verification is not None else None
        if problems is None:
            return
        self._verified = not problems
        if problems:
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            warn(
                f"a published checkpoint is damaged: {problems[0]}{more}; a resume skips it; the next save replaces it"
            )

    @property
    def metrics(self) -> dict[str, float]:
        """Of the newest published save, and of the newest verified checkpoint; rank 0's are complete."""
        found = {} if self.published_s is None else {"checkpoint/background_s": self.published_s}
        return found if self._verified is None else {**found, "checkpoint/verified": float(self._verified)}

    def close(self) -> None:
        """Waits until the last published checkpoint is verified, if ``verify`` is set."""
        if self._verify:
            run_together(lambda: self._verification.close(wait=True) if self._verification is not None else None)
            self._poll_verification()

    @contextlib.contextmanager
    def _clearing_up(self) -> Iterator[None]:
        """Removes the files of a failed save; every rank raises rank 0's error."""
        try:
            yield
        except RunError as error:
            last = self._publication.abandon(error) if self._publication is not None else error
            self._began = self._write = self._publication = None
            raise RunError(broadcast_data(str(last), str)) from error

    def newest_step(self) -> int:
        """The step of the checkpoint that ``latest`` names, unverified; 0 if there is none."""
        return broadcast_data(latest_step(self._root) if rank() == 0 else 0, int)

    def resume(self, policy: Policy, *, sweep: bool = False, snapshots: Snapshots | None = None) -> TrainerState:
        """Loads the newest intact checkpoint into ``policy``; returns the state of a new run if there is none.

        A damaged checkpoint is skipped with a warning, and the one before it is tried.

        Args:
            policy: of the same architecture, under any layout.
            sweep: first remove temporary files of killed processes. Only the run itself may do so; readers of its
                checkpoints must not change the folder.
            snapshots: in memory; one that is at least as new as the newest checkpoint is taken instead.

        Raises:
            RunError: checkpoints exist, but none of them is intact.
        """
        if sweep:
            run_together(lambda: clean_leftovers(self._root) if rank() == 0 else [])
        if snapshots is not None and (state := snapshots.resume(policy, least=self.newest_step())) is not None:
            return state
        folder = self.find()
        return TrainerState() if folder is None else self.load(policy, folder)

    def go_back(self, policy: Policy, part: CheckpointPart) -> TrainerState:
        """Loads the newest intact checkpoint into a running ``policy``, and of its parts only ``part``.

        Raises:
            RunError: there is none, or it cannot be read.
        """
        self.finish()
        folder = self.find()
        if folder is None:
            raise RunError(f"{self._root}: no checkpoint to go back to")
        return self.load(policy, folder, [part])

    def load(self, policy: Policy, folder: Path, parts: Sequence[CheckpointPart] | None = None) -> TrainerState:
        """Loads a checkpoint that :meth:`find` returned, with ``parts`` or all of them.

        A converted checkpoint contains only the model.

        Raises:
            RunError: its state cannot be read.
        """
        load_policy(policy, folder / MEGATRON_PART)
        if not (folder / _STATE).is_file():
            return TrainerState()
        for warning in load_parts(self._parts if parts is None else parts, folder):
            warn(warning)
        return TrainerState.read(folder)

    def find(self, folder: Path | None = None) -> Path | None:
        """The newest intact checkpoint, or ``folder``, verified; None if there is no checkpoint yet.

        Raises:
            RunError: the folder is damaged, or checkpoints exist, but none of them is intact.
        """
        found = with_shared_sums(lambda sums: self._find(folder, sums), str | None)
        return None if found is None else Path(found)

    def _find(self, folder: Path | None, sums: Sums) -> str | None:
        if folder is None:
            return self._newest_whole(sums)
        problems = verify_manifest(folder, sums=sums)
        if problems:
            raise RunError(f"checkpoint {folder} is incomplete or damaged: {problems[0]}")
        return str(folder)

    def _newest_whole(self, sums: Sums) -> str | None:
        path, warnings = find_latest_whole(self._root, sums=sums)
        for warning in warnings:
            warn(warning)
        if path is not None:
            return str(path)
        if any(self._root.glob("step_*")):
            why = f" ({warnings[0]})" if warnings else ""
            raise RunError(f"{self._root}: no intact checkpoint{why}; move the folder away to start from step 0")
        return None

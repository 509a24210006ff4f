"""The learned drafter of a run: its data, its training, and its transfer to the engines."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch

from megatron_tlt.actor.policy import Policy
from megatron_tlt.config.drafter import DrafterConfig
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.config.spot import session_start
from megatron_tlt.data.rollout_batch import RolloutBatch
from megatron_tlt.drafter import (
    FAILURES,
    DataBuffer,
    DrafterState,
    DrafterTrainer,
    Entry,
    SessionResult,
    SharedWeights,
    aux_layers_of,
    first_drafter,
    load_drafter,
    read_checkpoint,
    save_drafter,
    train_session,
    write_checkpoint,
)
from megatron_tlt.drafter.folder import WEIGHTS
from megatron_tlt.errors import RunError
from megatron_tlt.models.hf_folder import read_hf_config
from megatron_tlt.observe.timeline import Timeline
from megatron_tlt.platform.collectives import all_gather_data, any_rank
from megatron_tlt.platform.device import barrier, current_device, log_once, rank, warn, world_size
from megatron_tlt.platform.offload import StorageOffload
from megatron_tlt.platform.rank_group import WholeGroup
from megatron_tlt.reshard.interface import SyncReport, WeightSync
from megatron_tlt.rollout.interface import RolloutEngine
from megatron_tlt.rollout.recorded_states import RecordedStates
from megatron_tlt.trainer.engine_data import EngineData
from megatron_tlt.trainer.frozen_drafter import compare_with_frozen, held
from megatron_tlt.trainer.responses import ScoredResponse
from megatron_tlt.trainer.session_diagnosis import SessionDiagnosis, SessionWarnings
from megatron_tlt.trainer.spot_checkpoints import SpotCheckpoints
from megatron_tlt.trainer.spot_trainer import SpotReport, SpotTrainer, newest_rank, spot_metrics
from megatron_tlt.trainer.synchronization import drafter_sync

# keys of a rank's buffer entries, in its part of a checkpoint
_KEYS = "entries.json"


class OnlineDrafter(Protocol):
    """The interface of a trained drafter for the training step; all ranks make every call together."""

    aux_layers: tuple[int, ...]

    def check(self, engine: RolloutEngine) -> None: ...
    def add(
        self, step: int, scored: Sequence[ScoredResponse], batch: RolloutBatch, states: Mapping[int, torch.Tensor]
    ) -> None: ...
    def leave_device(self) -> None: ...
    def train(self, step: int, policy: Policy) -> dict[str, float]: ...
    def synchronize(self, verify: bool) -> SyncReport | None: ...


class _PolicyWeights:
    """Reads full weights of the policy one at a time; all ranks must read the same weights in the same order."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def __contains__(self, name: str) -> bool:
        return name in self._policy.model.weights.shapes

    def read(self, name: str) -> torch.Tensor:
        return dict(self._policy.export_weights((name,)))[name]


class DrafterManager:
    """One drafter, the same on every rank; all ranks call every method together.

    Args:
        config: of the run, with a ``drafter`` section.
        target: the folder with the policy's config; its weights are not read.
        folder: of the run; the first drafter and each rank's data are stored below its ``drafter/``.
        policy: the target model, whose weights the drafter starts from and shares.
        read_only: do not change the run's folder, which another process may be training in. No data is read or
            written, and the first drafter is written only if it is missing.
    """

    name = "drafter"

    def __init__(
        self, config: TltConfig, target: Path, folder: Path, policy: Policy, *, read_only: bool = False
    ) -> None:
        assert config.drafter is not None
        self._config: DrafterConfig = config.drafter
        self._run = config
        self._target = target
        self._folder = folder
        self._first = folder / "drafter" / "first"
        # reference for comparison; a drafter built from the target is meaningful only after its first training
        self._frozen = self._first if self._config.path is not None else folder / "drafter" / "first_trained"
        self._step = 0
        self._resumed = False
        self._read_only = read_only
        model = first_drafter(self._config, target, config.run.seed, _PolicyWeights(policy))
        if rank() == 0 and not (read_only and (self._first / WEIGHTS).is_file()):
            save_drafter(model, self._first, _engine_dtype(config))
        barrier()  # the engines of all ranks read this folder
        self.aux_layers: tuple[int, ...] = aux_layers_of(model.config)
        model = model.to(current_device().torch_device)
        self._group = WholeGroup() if world_size() > 1 else None
        self._policy = policy
        self._trainer = DrafterTrainer(model, self._config, config.run.seed)
        self._memory = StorageOffload()
        self._good = _copied(self._trainer.state)
        bounds = self._config.buffer.model_copy(update={"disk_bytes": 0}) if read_only else self._config.buffer
        self._buffer = DataBuffer(
            folder / "drafter" / f"data-{rank():05d}", bounds, config.run.seed + rank(), model.entry_size
        )
        self._sync: WeightSync | None = None
        self._spot: SpotTrainer | None = None
        self._checkpoints: SpotCheckpoints | None = None
        self._warnings = SessionWarnings(*session_start(config))
        # responses of the last step: the drafter is evaluated on them before it trains on them
        self._held: list[Entry] = []
        self._to_drafter_s = 0.0

    @property
    def first_folder(self) -> Path:
        """The folder of the drafter that engines start with."""
        return self._first

    @property
    def buffer(self) -> DataBuffer:
        """This rank's data."""
        return self._buffer

    @property
    def version(self) -> int:
        """Number of optimizer steps of the drafter."""
        return self._trainer.version

    def attach(self, engine: RolloutEngine) -> None:
        """Sets the engine that receives this rank's drafter."""
        shapes = {name: tuple(tensor.shape) for name, tensor in self._trainer.model.state_dict().items()}
        self._sync = drafter_sync(self._run, self._tensors, shapes, engine)

    def spot_trainer(self, engine: RolloutEngine, timeline: Timeline) -> SpotTrainer:
        """Creates the trainer that uses the engine's idle time; :meth:`train` adopts the resulting drafter.

        Raises:
            ConfigError: training needs more memory than ``spot.memory_gib``.
        """
        spot = self._run.spot
        assert spot is not None
        recorded = RecordedStates(spot.states_bytes)
        if spot.states_bytes:
            engine.record_into(recorded)
        tp = self._run.rollout.tensor_parallel_size
        self._checkpoints = SpotCheckpoints(self._folder / "drafter" / "spot", spot.checkpoint_every, self._trainer)
        self._spot = SpotTrainer(
            spot,
            self._trainer,
            self._buffer,
            self._checkpoints,
            timeline,
            global_batch=self._config.entries_per_step * world_size(),
            last_good=lambda: self._good,
            take_device=lambda: self._take_device(engine),
            newest=EngineData(recorded, rank() % tp, tp) if spot.states_bytes else None,
        )
        return self._spot

    def _take_device(self, engine: RolloutEngine) -> None:
        began = time.perf_counter()
        engine.sleep(level=2)
        self._memory.reload()
        self._to_drafter_s = time.perf_counter() - began

    def leave_device(self) -> None:
        """Offloads the drafter's tensors to the host, so that the engine has the device to itself."""
        if current_device().offloads:
            self._trainer.drop_gradients()
            self._memory.offload(self._trainer.held)

    def _tensors(self) -> Mapping[str, torch.Tensor]:
        return self._trainer.model.state_dict()

    def check(self, engine: RolloutEngine) -> None:
        """Checks that the engine holds the newest drafter.

        Raises:
            RunError: this rank's engine holds another version.
        """
        found = engine.versions["drafter"]
        if found != self.version:
            raise RunError(f"rank {rank()}: the engine's drafter has version {found}; the newest is {self.version}")

    def add(
        self, step: int, scored: Sequence[ScoredResponse], batch: RolloutBatch, states: Mapping[int, torch.Tensor]
    ) -> None:
        """Adds a step's responses to the buffer; ``states`` maps the index of a response to its states (T, E)."""
        self._step = step
        for index, hidden in states.items():
            one, length = scored[index], min(batch.lengths[index], len(hidden))
            entry = Entry(
                key=f"{step}/{one.problem}/{one.sample}",
                step=step,
                token_ids=batch.tokens(index)[:length].clone(),
                prompt_length=one.prompt_length,
                hidden=hidden[:length],
                reward=one.reward.value,
            )
            self._buffer.add(entry)
            if step + 1 == self._run.trainer.steps:
                self._held = held(self._held, entry)

    def train(self, step: int, policy: Policy) -> dict[str, float]:
        """Trains the drafter on the buffered responses; if the session fails, the last good drafter is restored.

        With ``spot``, waiting ranks have trained already: all ranks adopt the newest drafter and train the steps that
        are missing.

        Returns:
            Metrics of the session.
        """
        self._memory.reload()
        self._share(policy)
        compared = self._compare_with_frozen() if step + 1 == self._run.trainer.steps else {}
        if self._spot is None:
            result, metrics = self._session(step, self._config.session_steps), dict[str, float]()
        else:
            result, metrics = self._adopt_spot_drafter(step, self._spot)
        failed = result.outcome in FAILURES
        if failed:
            warn(
                f"the drafter's session of step {step + 1} ended with {result.outcome}: {FAILURES[result.outcome]}; "
                f"version {self._good.version} stays"
            )
            self._trainer.load_state(self._good)
        elif self._trainer.version != self._good.version:
            self._good = _copied(self._trainer.state)
        if not failed and self._trainer.version:
            self._freeze()
        failed = failed or metrics.get("spot/failed", 0.0) > 0
        return self._metrics(result) | {"drafter/failed": float(failed)} | metrics | compared

    def _freeze(self) -> None:
        """Saves the first trained version as the reference."""
        if rank() == 0 and not self._read_only and not (self._frozen / WEIGHTS).is_file():
            save_drafter(self._trainer.model, self._frozen)

    def _compare_with_frozen(self) -> dict[str, float]:
        """Compares the first drafter with the current one, on responses that neither was trained on.

        Returns no metrics if no earlier step trained the drafter.
        """
        if not all(all_gather_data((self._frozen / WEIGHTS).is_file(), bool)):
            self._held = []
            return {}
        newest = self._trainer.model
        frozen = load_drafter(self._frozen, read_hf_config(self._target), self._config.kind, newest.shared)
        frozen = frozen.to(current_device().torch_device)
        depth, most = self._run.speculation.num_speculative_tokens, self._config.max_tokens_per_micro_batch
        entries, self._held = self._held, []
        return compare_with_frozen(frozen, newest, self.version, entries, depth, most)

    def _share(self, policy: Policy) -> None:
        self._trainer.model.share(SharedWeights.of(_PolicyWeights(policy), policy.model.weights.tied))

    def _session(self, step: int, steps: int) -> SessionResult:
        return train_session(self._trainer, self._buffer, step, self._config.entries_per_step, steps, group=self._group)

    def _adopt_spot_drafter(self, step: int, spot_trainer: SpotTrainer) -> tuple[SessionResult, dict[str, float]]:
        """Broadcasts the newest drafter of any rank to all ranks, which then train the missing steps together."""
        spot = self._run.spot
        assert spot is not None
        reports = all_gather_data(spot_trainer.report, SpotReport)
        newest, before = newest_rank(reports), self._good.version
        self._trainer.forget_losses()
        if reports[newest].version != before:
            self._trainer.synchronize(newest, self._group)
            self._good = _copied(self._trainer.state)
            if rank() == newest:
                spot_trainer.save(step)
        trained = SessionResult("completed", reports[newest].version - before, reports[newest].metrics)
        bounds = session_start(self._run)
        diagnosis = SessionDiagnosis.of(reports, self._run.rollout.tensor_parallel_size, *bounds, before)
        self._warnings.check(step, diagnosis)
        metrics = spot_metrics(reports, before) | diagnosis.metrics
        metrics["transition/to_drafter_ms"] = 1e3 * max(all_gather_data(self._to_drafter_s, float))
        self._to_drafter_s = 0.0
        missing = spot.min_steps - trained.steps
        if missing > 0:
            rest = self._session(step, missing)
            trained = SessionResult(rest.outcome, trained.steps + rest.steps, rest.metrics or trained.metrics)
        return trained, metrics

    def _metrics(self, result: SessionResult) -> dict[str, float]:
        counts = self._buffer.counts
        return {
            **{f"drafter/{name}": value for name, value in result.metrics.items()},
            "drafter/version": float(self.version),  # of the drafter that is kept, not of the session's last step
            "drafter/steps": float(result.steps),
            "drafter/entries": float(len(self._buffer)),
            "drafter/buffer_mib": self._buffer.nbytes / 2**20,
            "drafter/dropped": float(sum(counts.dropped.values())),
        }

    def synchronize(self, verify: bool) -> SyncReport:
        """Transfers the newest drafter to every engine.

        Raises:
            RunError: an engine's weights differ from those that were sent.
        """
        assert self._sync is not None
        self._memory.reload()
        report = self._sync.sync(version=self.version, verify=verify)
        self.leave_device()
        return report

    def write(self, folder: Path) -> None:
        """Rank 0 writes the newest drafter as a folder that an engine can load."""
        self._memory.reload()
        if rank() == 0:
            save_drafter(self._trainer.model, folder, _engine_dtype(self._run))
        barrier()

    def save(self, folder: Path) -> None:
        """Writes this rank's part of a checkpoint: rank 0 the drafter, every rank the keys of its buffer."""
        self._memory.reload()
        (folder / _KEYS).write_text(json.dumps(self._buffer.snapshot()), encoding="utf-8")
        if rank() == 0:
            write_checkpoint(folder, self._trainer.model, self._trainer.state, {"step": self._step})

    def load(self, folders: Sequence[Path]) -> None:
        """Resumes from a checkpoint; responses sampled after it are dropped and sampled again."""
        self._memory.reload()
        state, extra = read_checkpoint(folders[0])
        self._trainer.load_state(state)
        self._good = _copied(self._trainer.state)
        self._step = int(extra["step"])
        self._resumed = True
        if not self._read_only:
            self._restore_data(folders)
        if self._spot is not None:
            self._share(self._policy)  # the next session comes before the next update

    def _restore_data(self, folders: Sequence[Path]) -> None:
        file = folders[rank()] / _KEYS if rank() < len(folders) else None
        keys = json.loads(file.read_text(encoding="utf-8")) if file is not None and file.is_file() else None
        missing = sum(all_gather_data(self._buffer.restore(self._step, keys), int))
        if missing:
            warn(
                f"{missing} responses that the checkpoint refers to are missing from the drafter's data in "
                f"{self._folder / 'drafter'}; the drafter trains without them, so repeated steps may differ"
            )

    def load_newer_spot_checkpoint(self) -> None:
        """After a resume, loads the spot trainer's checkpoint if it is newer than the run's own.

        That happens after a kill. A run that starts without a checkpoint drops the data of an earlier, killed run.
        """
        if not self._resumed:
            self._buffer.restore(-1)
            if rank() == 0 and self._frozen != self._first:
                shutil.rmtree(self._frozen, ignore_errors=True)
        if self._checkpoints is None:
            return
        self._memory.reload()
        before = self._trainer.version
        taken = self._checkpoints.take_over() if rank() == 0 else False
        if any_rank(taken):
            self._trainer.synchronize(0, self._group)
            self._good = _copied(self._trainer.state)
            log_once(f"the drafter resumes from version {self.version} of its last spot session, not {before}")


def _copied(state: DrafterState) -> DrafterState:
    """A copy in host memory; it is needed only if a session fails."""
    tensors = {}
    for name, tensor in state.tensors().items():
        tensors[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        tensors[name].copy_(tensor)
    return DrafterState.from_tensors(state.version, tensors, dict(state.numbers))


def _engine_dtype(config: TltConfig) -> torch.dtype:
    names = {"float32": torch.float32, "float16": torch.float16, "half": torch.float16}
    return names.get(str(config.rollout.dtype), torch.bfloat16)

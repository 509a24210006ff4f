"""One row of numbers per step: ``metrics.jsonl``, TensorBoard, and optionally Weights & Biases."""

from __future__ import annotations

import contextlib
import importlib
import math
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_tlt.config.schema import WandbConfig
from megatron_tlt.errors import ConfigError
from megatron_tlt.observe.jsonl import JsonLinesFile, read_jsonl
from megatron_tlt.observe.metric_table import aliases_of
from megatron_tlt.platform.files import atomic_write_text

METRICS_FILE = "metrics.jsonl"
LENGTH_CLASSES = ("short", "medium", "long")
"""Names in metrics for the thirds of a step's responses by length."""


def read_metrics(path: Path | str) -> list[dict[str, float | None]]:
    """The rows of a ``metrics.jsonl``: ``step``, ``wall_time`` (Unix seconds) and the metrics; NaN and inf are None.

    Raises:
        RunError: the file is missing or damaged other than in its last line.
    """
    return read_jsonl(path)


def recorded_steps(folder: Path) -> int:
    """The newest step in the metrics of a run's folder; 0 before the first. Raises as :func:`read_metrics` does."""
    file = folder / METRICS_FILE
    return max((int(row["step"] or 0) for row in read_metrics(file)), default=0) if file.is_file() else 0


class MetricsWriter(contextlib.AbstractContextManager["MetricsWriter"]):
    """Writes a run's metrics into its folder; used on rank 0 only.

    With ``wandb`` a resumed run continues its run there; raises ConfigError if that package is not installed.
    ``aliases``: libraries under whose names metrics are written too (``metric_table``).
    """

    def __init__(
        self,
        folder: Path | str,
        tensorboard: bool = True,
        wandb: WandbConfig | None = None,
        aliases: Sequence[str] = (),
    ) -> None:
        self.folder = Path(folder)
        self._file = JsonLinesFile(self.folder / METRICS_FILE)
        self._tensorboard = tensorboard
        self._aliases = aliases
        self._purge_step: int | None = None
        self._board: Any = None
        self._wandb = self._open_wandb(wandb) if wandb is not None else None

    def _open_wandb(self, config: WandbConfig) -> Any:
        try:
            module = importlib.import_module("wandb")
        except ImportError as error:
            raise ConfigError(
                "observe.wandb: the package wandb is not installed; allowed: null, or install wandb"
            ) from error
        id_file = self.folder / "wandb_id"
        if not id_file.exists():
            atomic_write_text(id_file, uuid.uuid4().hex[:12] + "\n")
        return module.init(
            project=config.project,
            entity=config.entity,
            mode=config.mode,
            dir=str(self.folder),
            name=self.folder.name,
            id=id_file.read_text(encoding="utf-8").strip(),
            resume="allow",
        )

    def _open_board(self) -> Any:
        if self._board is None:
            from torch.utils.tensorboard import SummaryWriter

            # purge_step makes TensorBoard drop the events that a killed run wrote after the resumed step.
            self._board = SummaryWriter(str(self.folder / "tensorboard"), purge_step=self._purge_step)
        return self._board

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Appends one row; raises RunError if the disk is full; no partial row remains."""
        numbers = self._numbers(values)
        self._file.append([{"step": int(step), "wall_time": round(time.time(), 3), **numbers}])
        self._log_elsewhere(step, numbers)

    def amend(self, step: int, values: Mapping[str, float]) -> None:
        """Adds ``values`` to the row of ``step``, or logs them if a killed run left no such row.

        Raises:
            RunError: the disk is full; the file is unchanged.
        """
        numbers = self._numbers(values)
        rows = read_jsonl(self._file.path)
        own = [row for row in rows if row.get("step") == step]
        if not own:
            self.log(step, values)
            return
        own[-1].update(numbers)
        self._file.replace(rows)
        self._log_elsewhere(step, numbers)

    def _numbers(self, values: Mapping[str, float]) -> dict[str, float]:
        numbers = {name: _number(value) for name, value in values.items()}
        return numbers | aliases_of(numbers, self._aliases)

    def _log_elsewhere(self, step: int, numbers: Mapping[str, float]) -> None:
        known = {name: value for name, value in numbers.items() if math.isfinite(value)}
        if self._tensorboard:
            board = self._open_board()
            for name, value in known.items():
                board.add_scalar(name, value, global_step=step)
            board.flush()
        if self._wandb is not None:
            self._wandb.log(known, step=int(step))

    def truncate_after(self, step: int) -> int:
        """Drops the rows after the resumed ``step``, so that no step is written twice; returns their number."""
        self._purge_step = step + 1
        if self._board is not None:
            self._board.close()
            self._board = None
        return self._file.truncate_after(step)

    def close(self) -> None:
        """Flushes and closes everything."""
        self._file.close()
        if self._board is not None:
            self._board.close()
            self._board = None
        if self._wandb is not None:
            self._wandb.finish()
            self._wandb = None

    def __exit__(self, *error: object) -> None:
        self.close()


def _number(value: Any) -> int | float:
    return int(value) if isinstance(value, (bool, int)) else float(value)

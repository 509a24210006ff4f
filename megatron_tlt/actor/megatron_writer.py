"""Writes a sharded state in the background, with Megatron's asynchronous writer.

The writer is forked, so it keeps the state of that moment while training continues; device tensors are copied to the
host first. This module fixes three defects of Megatron's writer: a write that fails on rank 0 only leaves the other
ranks in a collective; a killed writer process is waited for forever; and helper processes outlive this process, or die
of a signal that it survives.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.api import CheckpointException

from megatron_tlt.errors import RunError
from megatron_tlt.platform.collectives import failing_together
from megatron_tlt.platform.files import disk_full_error, is_disk_full
from megatron_tlt.platform.processes import stay_with_parent

_BACKEND, _VERSION = "torch_dist", 1


def cause_of(error: BaseException) -> BaseException:
    """The failure of one rank, from torch's collection of all ranks' failures (which is not an Exception)."""
    if isinstance(error, CheckpointException) and error.failures:
        return next(iter(error.failures.values()))[0]
    return error


def first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


@contextlib.contextmanager
def _write_problems(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError, CheckpointException) as error:
        cause = cause_of(error)
        if is_disk_full(cause, folder):
            raise disk_full_error(folder / "*.distcp", None) from cause
        if isinstance(error, RuntimeError):  # such as a failed collective
            raise
        raise RunError(f"{folder}: the checkpoint was not written: {first_line(cause)}") from cause


class _Results:
    """A forked writer's results, passed through an unnamed file that it shares with this process.

    Replaces Megatron's queue, whose server process imports the whole program again and dies of SIGTERM.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - open until the save ends

    def put(self, results: Any) -> None:
        pickle.dump(results, self._file)
        self._file.flush()

    def get_nowait(self) -> Any:
        self._file.seek(0)
        try:
            return pickle.load(self._file)
        except EOFError:
            raise queue.Empty from None


def _end_if_a_child_failed(signum: int, frame: FrameType | None) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            if ended[1]:
                os._exit(1)


def _write(function: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """The main function of a forked writer, which in turn forks one process per file."""
    stay_with_parent()
    os.register_at_fork(after_in_child=stay_with_parent)
    signal.signal(signal.SIGCHLD, _end_if_a_child_failed)
    torch.set_num_threads(1)  # the threads of a pool do not survive a fork
    function(*args, **kwargs)


class _Strategy(TorchDistSaveShardedStrategy):
    """Megatron's strategy; an error of rank 0's final write is stored in ``problem``."""

    problem: OSError | None = None

    def _get_save_and_finalize_callbacks(self, writer: Any, planned: Any) -> Any:
        finish = writer.finish

        def guarded(metadata: Any, results: Any) -> None:
            try:
                finish(metadata, results)
                save_config(CheckpointingConfig(_BACKEND, _VERSION), str(writer.checkpoint_dir))
            except OSError as error:
                self.problem = error

        writer.finish = guarded
        return super()._get_save_and_finalize_callbacks(writer, planned)


def _narrow_storages(sharded: dict[str, Any]) -> None:
    """Gives each host tensor a storage of exactly its own size, over the same memory.

    The writer writes whole storages, so it would copy all other tensors; the fork makes that copy unnecessary.
    """
    for shard in nested_values(sharded):
        if isinstance(shard, ShardedTensor) and shard.data.device.type == "cpu":
            shard.data = torch.from_dlpack(shard.data.detach())


class BackgroundWrite:
    """Writes a state into ``folder``, which must exist and be empty; every call is a collective over the world.

    Args:
        state: Megatron's sharded state; it may change after the constructor returns.
        folder: the same on every rank.

    Raises:
        RunError: a file operation fails on any rank; the constructor and all methods raise it on every rank.
    """

    def __init__(self, state: dict[str, Any], folder: Path) -> None:
        self._folder = folder
        self._strategy = _Strategy(_BACKEND, _VERSION)
        self._calls = AsyncCallsQueue(persistent=False)
        sharded, common = save_preprocess(state)
        _narrow_storages(sharded)
        with failing_together(), _write_problems(folder):
            TorchCommonSaveStrategy("torch", 1).save_common(common, folder)
        filesystem_async._results_queue = _Results()
        request = self._strategy.async_save(sharded, folder)
        if request.async_fn is not None:
            request = request._replace(async_fn=partial(_write, request.async_fn))
        self._calls.schedule_async_request(request)

    def done(self) -> bool:
        """Whether all ranks have finished writing; does not wait."""
        with failing_together(), _write_problems(self._folder):
            finished = bool(self._calls.maybe_finalize_async_calls())
            if self._strategy.problem is not None:
                raise self._strategy.problem
        return finished

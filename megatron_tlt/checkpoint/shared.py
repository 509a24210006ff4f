"""File work on a checkpoint shared by all ranks, with collectives that stay short even if the work is long.

A checkpoint of a 70B model has about a terabyte. If rank 0 hashed it while the others wait in a collective, the
collective would time out (``launcher.collective_timeout_s``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

from megatron_tlt.checkpoint import manifest
from megatron_tlt.checkpoint.files import atomic_folder
from megatron_tlt.checkpoint.leftovers import clean_leftovers
from megatron_tlt.checkpoint.manifest import FileSum, Sums, write_manifest
from megatron_tlt.data.packing import balance
from megatron_tlt.errors import RunError
from megatron_tlt.platform.collectives import all_gather_data, any_rank, broadcast_data, failing_together
from megatron_tlt.platform.device import barrier, collective_timeout_s, rank, world_size

T = TypeVar("T")
_POLL_S = 5.0


@contextlib.contextmanager
def _file_system_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        raise RunError(f"cannot access{where}: {error.strerror or error}") from error


def run_together(work: Callable[[], T]) -> T:
    """Runs ``work`` on every rank in a thread and returns its result once all ranks are done; a collective.

    Meanwhile the ranks meet every few seconds. ``work`` must not contain a collective. Raises RunError if it failed on
    one rank, with a RunError or an OSError; raised on all ranks.
    """
    every = min(_POLL_S, collective_timeout_s() / 4)
    with ThreadPoolExecutor(1, thread_name_prefix="together") as pool:
        result = pool.submit(work)
        while any_rank(not wait([result], every).done):
            pass
    with failing_together(), _file_system_errors():
        return result.result()


def _hash_share(files: Sequence[str], sizes: Sequence[int]) -> list[FileSum]:
    """Sums of all files, each hashed by one rank; a collective."""
    parts = balance(sizes, world_size())
    own = [Path(files[i]) for i in parts[rank()]]
    gathered = all_gather_data(run_together(lambda: manifest.sha256_sums(own)), list[FileSum])
    sums = dict(zip((i for part in parts for i in part), (s for part in gathered for s in part), strict=True))
    return [sums[i] for i in range(len(files))]


def with_shared_sums(function: Callable[[Sums], T], kind: Any) -> T:
    """Rank 0's ``function(sums)``, plain data of type ``kind``, on every rank; a collective.

    All ranks share the hashing that ``sums`` requests. Apart from that, ``function`` must be fast: the others wait in a
    collective. Raises RunError if ``function`` raised it, or an OSError; raised on all ranks.
    """
    if world_size() == 1:
        return run_together(lambda: function(manifest.sha256_sums))
    job = tuple[list[str], list[int]] | None

    def ask(files: Sequence[Path]) -> list[FileSum]:
        # A file that disappeared has no size; hashing reports it.
        sizes = [file.stat().st_size if file.is_file() else 0 for file in files]
        names = [str(file) for file in files]
        broadcast_data((names, sizes), job)
        return _hash_share(names, sizes)

    result: T | None = None
    work: tuple[list[str], list[int]] | None
    with failing_together():
        if rank() == 0:
            with contextlib.ExitStack() as end:
                end.callback(lambda: broadcast_data(None, job))
                with _file_system_errors():
                    result = function(ask)
        else:
            while (work := broadcast_data(None, job)) is not None:
                _hash_share(*work)
    return broadcast_data(result, kind)


@contextlib.contextmanager
def shared_folder(target: Path) -> Iterator[Path]:
    """One temporary folder on all ranks that becomes ``target``, with a manifest, once the block succeeds on all.

    A collective. It first removes temporary folders of killed processes that were writing ``target``. Raises RunError
    if a file operation fails; ``target`` is unchanged.
    """
    run_together(lambda: clean_leftovers(target.parent, target.name) if rank() == 0 else [])
    temporary: Path | None = None
    with contextlib.ExitStack() as writing:
        with failing_together():
            if rank() == 0:
                temporary = writing.enter_context(atomic_folder(target))
        folder = Path(broadcast_data(str(temporary), str))
        yield folder
        barrier()
        with_shared_sums(lambda sums: str(write_manifest(folder, sums)), str)
        run_together(writing.pop_all().close)  # flushes everything to disk, which may take long

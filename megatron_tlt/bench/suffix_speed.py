"""Times suffix trees at many stored tokens, against arctic-inference's, and a drafter's memory under its bound."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import psutil

from megatron_tlt.bench.arctic import ArcticTree
from megatron_tlt.bench.responses import NoisyCopies
from megatron_tlt.bench.result import BenchmarkResult, ratio_of_medians
from megatron_tlt.config.speculation import SuffixConfig
from megatron_tlt.speculation.ngram_index import NgramIndex
from megatron_tlt.speculation.suffix import SuffixDrafter
from megatron_tlt.speculation.suffix_tree import SpeculationRule, SuffixTree, Tokens
from megatron_tlt.speculation.token_drafter import FinishedResponse

CHUNK = 4
"""Tokens appended at once, as after accepted drafts."""


class _Timed(Protocol):
    def start(self) -> None: ...
    def append(self, tokens: Tokens) -> None: ...
    def propose(self, said: Tokens, max_tokens: int) -> Any: ...
    def finish(self) -> None: ...
    def nbytes(self) -> int: ...


class _Ours:
    def __init__(self, depth: int) -> None:
        self._tree, self._rule = SuffixTree(depth), SpeculationRule()

    def start(self) -> None:
        self._handle = self._tree.start()

    def append(self, tokens: Tokens) -> None:
        self._tree.append(self._handle, tokens)

    def propose(self, said: Tokens, max_tokens: int) -> Any:
        return self._tree.propose(self._handle, max_tokens, self._rule)

    def finish(self) -> None:
        self._tree.finish(self._handle)

    def nbytes(self) -> int:
        return self._tree.nbytes


class _Arctic:
    """Its tree without the surrounding cache, with arrays instead of lists: its fastest interface."""

    def __init__(self, depth: int) -> None:
        self._tree, self._depth, self._number = ArcticTree(depth), depth, 0

    def start(self) -> None:
        self._number += 1

    def append(self, tokens: Tokens) -> None:
        self._tree.extend_ndarray(self._number, tokens)

    def propose(self, said: Tokens, max_tokens: int) -> Any:
        return self._tree.speculate_ndarray(said[-self._depth :], max_tokens, 1.0, 0.0, 0.1, False)

    def finish(self) -> None:
        pass

    def nbytes(self) -> int:
        return int(self._tree.estimate_memory())


class _Ngram:
    def __init__(self) -> None:
        self._index = NgramIndex(2, 4, 32)
        self._context, self._draft = np.empty(4, np.int32), np.empty(32, np.int32)

    def start(self) -> None:
        self._handle = self._index.start()

    def append(self, tokens: Tokens) -> None:
        self._index.append(self._handle, tokens)

    def propose(self, said: Tokens, max_tokens: int) -> Any:
        known = self._index.context(self._handle, self._context)
        for size in range(min(known, 4), 1, -1):
            if self._index.follow(self._context, size, self._draft[:max_tokens]):
                return self._draft[:max_tokens].tolist()
        return []

    def finish(self) -> None:
        self._index.finish(self._handle)

    def nbytes(self) -> int:
        return self._index.nbytes


def _store(timed: _Timed, response: Tokens) -> None:
    timed.start()
    timed.append(response)
    timed.finish()


def _time(timed: _Timed, response: Tokens, drafts: int) -> tuple[float, float]:
    """Median seconds per proposal, and mean seconds per appended token, over one response."""
    appending, proposals = 0.0, []
    timed.start()
    for done in range(0, len(response), CHUNK):
        start = time.perf_counter()
        timed.append(response[done : done + CHUNK])
        middle = time.perf_counter()
        timed.propose(response[: done + CHUNK], drafts)
        proposals.append(time.perf_counter() - middle)
        appending += middle - start
    timed.finish()
    return statistics.median(proposals), appending / len(response)


def speed(result: BenchmarkResult, sizes: Sequence[int], repeats: int, depth: int, drafts: int) -> None:
    """One tree each, filled with the same ``NoisyCopies`` and timed at each of ``sizes``; targets at the largest."""
    trees: dict[str, _Timed] = {"suffix": _Ours(depth), "n-gram": _Ngram()}
    if ArcticTree is not None:
        trees["arctic"] = _Arctic(depth)
    source, stored = NoisyCopies(), 0
    for timed in trees.values():
        _time(timed, source.draw(), drafts)  # triggers compilation
    for size in sorted(sizes):
        while stored < size:
            response = source.draw()
            stored += len(response)
            for timed in trees.values():
                _store(timed, response)
        proposing: dict[str, list[float]] = {name: [] for name in trees}
        appending: dict[str, list[float]] = {name: [] for name in trees}
        for turn in range(repeats):
            response = source.draw()
            stored += len(response)
            names = list(trees)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                proposal, token = _time(trees[name], response, drafts)
                proposing[name].append(proposal)
                appending[name].append(token)
        for name, timed in trees.items():
            row: dict[str, Any] = {
                "part": "speed",
                "case": name,
                "stored_tokens": size,
                "us_per_proposal": statistics.median(proposing[name]) * 1e6,
                "us_per_token": statistics.median(appending[name]) * 1e6,
                "bytes_per_token": timed.nbytes() / stored,
            }
            if name == "arctic":
                row["over_suffix"] = {
                    "proposal": ratio_of_medians(proposing[name], proposing["suffix"]),
                    "token": ratio_of_medians(appending[name], appending["suffix"]),
                    "bytes": timed.nbytes() / trees["suffix"].nbytes(),
                }
            result.rows.append(row)
    ours = next(row for row in result.rows[::-1] if row.get("case") == "suffix" and row["part"] == "speed")
    result.target("us_per_proposal_at_most_tokens", ours["us_per_proposal"], "<=", 20.0)
    result.target("us_per_token_at_most_tokens", ours["us_per_token"], "<=", 20.0)
    if "arctic" in trees:
        theirs = result.rows[-1]["over_suffix"]
        result.target("proposal_arctic_over_suffix", theirs["proposal"]["ratio"], ">=", 1.0)
        result.target("token_arctic_over_suffix", theirs["token"]["ratio"], ">=", 1.0)
        result.target("bytes_arctic_over_suffix", theirs["bytes"], ">=", 2.0)


def bounded_memory(result: BenchmarkResult, appends: int, bound: int) -> None:
    """Appends tokens of problems that repeat every epoch to a ``SuffixDrafter`` with a memory bound in bytes.

    An epoch's trees need several times the bound; a problem's eight responses form a rollout. The process's memory is
    compared with the drafter's own count.
    """
    warm = SuffixDrafter(SuffixConfig())
    warm.start("a", "p", [1, 2, 3])
    warm.extend("a", [1, 2, 3])
    warm.propose("a", 4)
    warm.finish("a")
    drafter, process = SuffixDrafter(SuffixConfig(max_bytes=bound, window=4)), psutil.Process()
    source = NoisyCopies(copies=8)
    problems = max(1, appends // 5 // (8 * 1000))  # five epochs
    before = process.memory_info().rss
    most_held = most_resident = appended = 0
    rollout: list[FinishedResponse] = []
    began = time.perf_counter()
    for number in itertools.count():
        if appended >= appends:
            break
        response = source.draw()
        drafter.start("a", str(source.group % problems), [1, 2, 3])
        for done in range(0, len(response), CHUNK):
            drafter.extend("a", response[done : done + CHUNK].tolist())
        drafter.finish("a")
        rollout.append(FinishedResponse(str(source.group % problems), [1, 2, 3], response.tolist()))
        appended += len(response)
        most_held = max(most_held, drafter.memory_bytes)
        if number % 20 == 0:
            most_resident = max(most_resident, process.memory_info().rss - before)
        if number % 8 == 7:
            drafter.end_rollout(rollout)
            rollout.clear()
    result.rows.append(
        {
            "part": "memory",
            "case": f"suffix drafter, bound {bound >> 20} MiB",
            "stored_tokens": appended,
            "us_per_token": (time.perf_counter() - began) / appended * 1e6,
            "mib": {"held": most_held / 2**20, "process": most_resident / 2**20},
            "evictions": {name: count for name, count in drafter.counters().items() if count},
        }
    )
    result.target("held_over_bound", most_held / bound, "<=", 1.0)
    result.target("process_memory_over_bound", most_resident / bound, "<=", 1.25)

"""Which responses are kept: a window of each problem's own visits, and the order of eviction when memory is short."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_tlt.config.speculation import SuffixConfig
from megatron_tlt.speculation.suffix import SuffixDrafter
from megatron_tlt.speculation.suffix_store import PROBLEM_BYTES, RESPONSE_BYTES, ResponseStore
from megatron_tlt.speculation.token_drafter import FinishedResponse
from tests.speculation.suffix_requests import MIN_BYTES


def visit(store: ResponseStore, problem: str, *, tokens: int = 10) -> None:
    store.record(problem, store.newest_visit(problem) + 1, [np.zeros(tokens, np.int32)])
    store.expire(problem)


def kept(store: ResponseStore) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for response in store:
        found.setdefault(response.problem, []).append(response.visit)
    return found


def test_a_problem_that_comes_often_does_not_age_one_that_comes_rarely() -> None:
    """Two files of 20 and 200 rows, read in parallel for 400 steps: 200 epochs of the first, 20 of the second."""
    store = ResponseStore(window=16, max_bytes=1 << 30)
    for step in range(400):
        for i in range(10):
            visit(store, f"small/{(10 * step + i) % 20}")
            visit(store, f"large/{(10 * step + i) % 200}")
    held = kept(store)
    assert len(held) == 220
    assert all(visits == list(range(185, 201)) for problem, visits in held.items() if problem.startswith("small"))
    assert all(visits == list(range(5, 21)) for problem, visits in held.items() if problem.startswith("large"))


@pytest.mark.parametrize("window", [0, 1, 3])
def test_the_window_counts_visits_of_the_problem(window: int) -> None:
    store = ResponseStore(window, 1 << 20)
    for _ in range(5):
        visit(store, "p")
    assert len(kept(store).get("p", [])) == window


def test_old_visits_leave_before_new_ones_and_then_the_problems_that_came_longest_ago() -> None:
    each = 40 + RESPONSE_BYTES
    store = ResponseStore(window=4, max_bytes=3 * PROBLEM_BYTES + 5 * each)
    for problem in ("a", "b", "c", "a", "b", "c", "a"):
        visit(store, problem)
    assert store.nbytes == 3 * PROBLEM_BYTES + 7 * each
    dropped, problems = store.shrink()
    # first the response of age 2, then, of those of age 1, that of b, whose last visit is oldest
    assert [(response.problem, response.visit) for response in dropped] == [("a", 1), ("b", 1)] and problems == 0
    assert kept(store) == {"b": [2], "c": [1, 2], "a": [2, 3]}
    for problem in ("d", "e"):
        visit(store, problem)
    dropped, problems = store.shrink()
    assert problems == 2 and kept(store) == {"a": [3], "d": [1], "e": [1]}
    assert store.nbytes == 3 * (PROBLEM_BYTES + each)


def test_engines_keep_the_same_whatever_they_decoded_themselves() -> None:
    """Trees take different memory on each engine; the stored responses must not depend on it."""
    rng = np.random.default_rng(0)
    drafters = [SuffixDrafter(SuffixConfig(max_bytes=MIN_BYTES)) for _ in range(3)]
    for step in range(30):
        responses = []
        for problem in range(6):
            tokens = rng.integers(0, 1000, 4000).tolist()
            responses.append(FinishedResponse(f"p{(6 * step + problem) % 40}", (1, 2), tokens))
            # the third engine decodes nothing
            if (drafter := drafters[problem % 3]) is not drafters[2]:
                drafter.start("a", responses[-1].problem, (1, 2))
                drafter.extend("a", tokens)
                drafter.finish("a")
        for drafter in drafters:
            drafter.end_rollout(responses)
            assert drafter.memory_bytes <= MIN_BYTES
    stored = [[(r.problem, r.visit, r.tokens.tobytes()) for r in drafter._store] for drafter in drafters]
    assert stored[0] == stored[1] == stored[2] and len(stored[0]) > 20
    assert all(drafter.counters()["problems_evicted"] > 0 for drafter in drafters)

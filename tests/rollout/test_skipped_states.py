"""The ring of skipped states gives back what was put in, newest first in what it keeps."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_tlt.config.speculation import SkippedConfig
from megatron_tlt.rollout.skipped_states import SkippedStates
from megatron_tlt.rollout.vllm_head import HeadInput, chunks

FEATURES = 2
ROW_BYTES = 4 * FEATURES


def value(request: str, position: int, time: int) -> list[float]:
    return [float(position), float(1000 * int(request) + time)]


@given(
    window=st.integers(0, 6),
    rows=st.integers(0, 12),
    actions=st.lists(
        st.one_of(
            # the requests of a step, each by how many tokens
            st.lists(st.integers(0, 3), min_size=3, max_size=3).filter(any),
            st.just([1, 1, 1]),
            st.just([1, 0, 1]),
            st.tuples(st.just("take"), st.integers(0, 2)),
            st.tuples(st.just("back"), st.integers(0, 2)),
            st.tuples(st.just("forget"), st.integers(0, 2)),
        ),
        max_size=25,
    ),
    by_step=st.booleans(),
)
def test_against_a_plain_model(
    window: int, rows: int, actions: list[list[int] | tuple[str, int]], by_step: bool
) -> None:
    store = SkippedStates(SkippedConfig(window=window, max_bytes=rows * ROW_BYTES), max_requests=3)
    capacity = min(rows, 3 * window)
    written: list[tuple[str, int]] = []  # who wrote each row, ever
    held: dict[str, dict[int, tuple[int, list[float]]]] = {"0": {}, "1": {}, "2": {}}
    following = {"0": 0, "1": 0, "2": 0}
    for time, action in enumerate(actions):
        if isinstance(action, list):
            spans, states = [], []
            for index, length in enumerate(action):
                name = str(index)
                if length:
                    spans.append((name, following[name], length))
                for _ in range(length):
                    position = following[name]
                    states.append(value(name, position, time))
                    held[name][position] = (len(written), states[-1])
                    written.append((name, position))
                    following[name] += 1
                held[name] = {at: kept for at, kept in held[name].items() if at >= following[name] - window}
            if by_step and max(action) == 1:
                requests = [name for name, _, _ in spans]
                parts = list(torch.tensor(states).split(1, dim=1))
                store.append_step(parts, requests, np.array([position for _, position, _ in spans]))
            else:
                store.append(torch.tensor(states), spans)
            continue
        kind, name = action[0], str(action[1])
        if kind == "take":
            expected = {at: states for at, (row, states) in held[name].items() if row >= len(written) - capacity}
            found = {
                gap.position + offset: store.states[row].tolist()
                for gap in store.take(name)
                for offset, row in enumerate(gap.rows.tolist())
            }
            assert found == expected
            held[name] = {}
        elif kind == "back":  # preempted: its last two tokens are computed anew
            following[name] = max(0, following[name] - 2)
            store.drop_from(name, following[name])
            held[name] = {at: kept for at, kept in held[name].items() if at < following[name]}
        else:
            store.forget(name)
            held[name] = {}
    assert store.counts.skipped == len(written)
    assert store.counts.filled + store.counts.dropped <= store.counts.skipped


def test_gaps_are_runs_of_positions() -> None:
    store = SkippedStates(SkippedConfig(), 2)
    states = torch.arange(12.0).view(6, 2)
    store.append(states[:3], [("a", 4, 2), ("b", 0, 1)])
    store.append(states[3:5], [("a", 6, 2)])
    store.append(states[5:], [("a", 11, 1)])
    gaps = store.take("a")
    assert [gap.position for gap in gaps] == [4, 11]
    assert torch.equal(store.states[gaps[0].rows], states[[0, 1, 3, 4]])
    assert torch.equal(store.states[gaps[1].rows], states[5:])
    assert store.take("a") == [] and store.take("never") == []
    assert (store.counts.skipped, store.counts.filled, store.counts.dropped) == (6, 5, 0)
    store.release()
    assert store.take("b") == []
    store.append(states[:2], [("b", 1, 2)])
    assert torch.equal(store.states[store.take("b")[0].rows], states[:2])


@given(lengths=st.lists(st.integers(1, 9), max_size=8), limit=st.integers(1, 6))
def test_chunks_keep_order_and_limit(lengths: list[int], limit: int) -> None:
    inputs = [HeadInput(row, 10 * row, torch.arange(length)[:, None]) for row, length in enumerate(lengths)]
    groups = list(chunks(inputs, limit))
    sizes = [sum(len(part.states) for part in group) for group in groups]
    assert all(size == limit for size in sizes[:-1]) and all(0 < size <= limit for size in sizes[-1:])
    found = [
        (part.row, part.position + int(offset), int(state))
        for group in groups
        for part in group
        for offset, state in enumerate(part.states[:, 0])
    ]
    assert found == [(row, 10 * row + at, at) for row, length in enumerate(lengths) for at in range(length)]
    assert all(len(part.states) for group in groups for part in group)

"""Uniform numbers derived from seeds and positions."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_tlt.speculation.uniforms import Use, uniforms


@given(st.lists(st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**20)), min_size=1, max_size=20))
def test_each_is_in_the_unit_interval_and_does_not_depend_on_the_others(rows: list[tuple[int, int]]) -> None:
    seeds, positions = (np.array(column, dtype=np.uint64) for column in zip(*rows, strict=True))
    found = uniforms(Use.DRAFT, seeds, positions)
    assert ((found >= 0.0) & (found < 1.0)).all()
    for index in range(len(rows)):
        assert uniforms(Use.DRAFT, seeds[index : index + 1], positions[index : index + 1])[0] == found[index]


def test_neighbouring_seeds_and_positions_are_uniform_and_uncorrelated() -> None:
    seeds, positions = (axis.ravel().astype(np.uint64) for axis in np.meshgrid(np.arange(300), np.arange(300)))
    grid = uniforms(Use.DRAFT, seeds, positions).reshape(300, 300)
    values = np.sort(grid.ravel())
    distance = np.abs(values - (np.arange(len(values)) + 0.5) / len(values)).max()  # Kolmogorov-Smirnov statistic
    assert distance < 1.95 / np.sqrt(len(values))  # significance 0.001
    centred = grid - 0.5
    for a, b in ((centred[1:], centred[:-1]), (centred[:, 1:], centred[:, :-1]), (centred, centred.T)):
        pairs = (a * b)[a != b]
        assert abs(pairs.mean()) < 4 * pairs.std() / np.sqrt(len(pairs) / 2)


def test_uses_are_uncorrelated() -> None:
    seeds, positions = np.arange(90_000, dtype=np.uint64) // np.uint64(300), np.arange(90_000, dtype=np.uint64)
    columns = np.stack([uniforms(use, seeds, positions % np.uint64(300)) for use in Use])
    correlations = np.corrcoef(columns)[~np.eye(len(Use), dtype=bool)]
    assert np.abs(correlations).max() < 4.5 / np.sqrt(columns.shape[1])

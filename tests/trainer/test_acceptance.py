"""Accounts of drafts by position and length."""

from __future__ import annotations

import pytest

from megatron_tlt.rollout.types import DraftStats
from megatron_tlt.trainer.acceptance import acceptance_metrics, length_classes


def test_thirds_by_length_with_equal_lengths_together() -> None:
    assert length_classes([5, 1, 9]) == ["medium", "short", "long"]
    assert length_classes([4, 4, 4, 4]) == ["short"] * 4
    assert length_classes([7]) == ["long"]


def test_shares_at_each_position_and_lengths_by_class() -> None:
    drafts = [
        DraftStats(4, 5, 3, 6, 1, (1, 0)),
        DraftStats(4, 6, 3, 6, 2, (1, 1)),
        DraftStats(5, 15, 4, 8, 8, (4, 4)),
    ]
    metrics = acceptance_metrics((5, 6, 15), drafts, 40)
    assert metrics["speculation/drafter_version"] == 40
    assert metrics["speculation/accepted_at_1"] == pytest.approx(6 / 10)
    assert metrics["speculation/accepted_at_2"] == pytest.approx(5 / 10)
    assert metrics["speculation/acceptance_length_short"] == pytest.approx(5 / 4)
    assert metrics["speculation/acceptance_length_long"] == pytest.approx(3.0)
    assert acceptance_metrics([3], [DraftStats(3, 3)], None) == {"speculation/acceptance_length_long": 1.0}

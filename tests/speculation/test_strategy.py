"""Strategies as data."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_tlt.speculation.strategy import DRAFTERS, OFF, Strategy


@given(st.sampled_from(DRAFTERS[1:]), st.integers(1, 64), st.booleans())
def test_names_come_back(drafter: str, num_tokens: int, by_length: bool) -> None:
    strategy = Strategy(drafter, num_tokens, by_length)
    assert Strategy.parse(strategy.name) == strategy
    assert strategy.verify_tokens == num_tokens + 1


def test_off_is_the_default() -> None:
    assert Strategy() == OFF == Strategy.parse("off")
    assert OFF.verify_tokens == 1


@pytest.mark.parametrize("name", ["eagle", "off-3", "tree-3", "eagle-0", "eagle-x", "eagle-3-by-width", ""])
def test_what_no_engine_can_do_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"allowed"):
        Strategy.parse(name)

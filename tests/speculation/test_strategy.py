"""Strategies as data."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_tlt.speculation.strategy import DRAFTERS, OFF, Strategy


@given(st.sampled_from(DRAFTERS[1:]), st.integers(1, 64), st.booleans(), st.integers(0, 99))
def test_names_are_parsed_back(drafter: str, num_tokens: int, by_length: bool, percent: int) -> None:
    strategy = Strategy(drafter, num_tokens, by_length, percent if drafter != "ngram" else 0)
    assert Strategy.parse(strategy.name) == strategy
    assert strategy.verify_tokens == num_tokens + 1


def test_a_pair_is_of_its_drafters_and_a_bound_makes_a_source_of_its_own() -> None:
    pair = Strategy.parse("suffix+eagle3-5-p50")
    assert pair.drafters == ("suffix", "eagle3") and pair.uses({"eagle3"}) and not pair.uses({"eagle", "off"})
    assert pair.source == "suffix+eagle3-p50" and Strategy.parse("suffix+eagle3-3-by-length").source == "suffix+eagle3"
    assert not OFF.uses({"off"}) and OFF.drafters == ()


def test_off_is_the_default() -> None:
    assert Strategy() == OFF == Strategy.parse("off")
    assert OFF.verify_tokens == 1


@pytest.mark.parametrize(
    "name",
    [
        "eagle",
        "off-3",
        "tree-3",
        "eagle-0",
        "eagle-x",
        "eagle-3-by-width",
        "",
        "ngram-3-p50",
        "eagle-3-p0",
        "eagle-3-p100",
    ],
)
def test_impossible_strategies_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"allowed"):
        Strategy.parse(name)

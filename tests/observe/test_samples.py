"""Which responses are chosen to be read, how long texts are cut, and what a resume does to the file."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_tlt.observe.jsonl import read_jsonl
from megatron_tlt.observe.samples import EVALUATION, SAMPLES_FILE, TRAIN, SampleLog, SampleRow, choose_samples, shorten


def test_best_worst_and_longest_are_chosen_in_this_order() -> None:
    rewards, lengths = [0.5, 0.0, 1.0, 0.0, 1.0], [9, 3, 4, 5, 6]
    assert choose_samples(rewards, lengths, 1) == {2: ["best"]}
    assert choose_samples(rewards, lengths, 2) == {2: ["best"], 3: ["worst"]}
    assert choose_samples(rewards, lengths, 3) == {2: ["best"], 3: ["worst"], 0: ["longest"]}
    assert choose_samples(rewards, lengths, 4) == {2: ["best"], 3: ["worst"], 0: ["longest"], 1: ["other"]}


def test_one_response_may_be_chosen_for_several_reasons() -> None:
    assert choose_samples([0.0, 1.0], [3, 7], 3) == {1: ["best", "longest"], 0: ["worst"]}
    assert choose_samples([0.5], [3], 3) == {0: ["best", "worst", "longest"]}
    assert choose_samples([0.0, 0.0, 0.0], [1, 1, 1], 2) == {0: ["best"], 2: ["worst"]}, "equal rewards"
    assert choose_samples([], [], 3) == choose_samples([1.0], [1], 0) == {}


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.integers(1, 9)), max_size=12), st.integers(0, 15))
def test_never_more_than_asked_for_and_all_of_them_where_there_are_no_more(
    responses: list[tuple[float, int]], count: int
) -> None:
    chosen = choose_samples([r for r, _ in responses], [n for _, n in responses], count)
    assert len(chosen) <= min(count, len(responses)) and set(chosen) <= set(range(len(responses)))
    if count >= len(responses) + 3:
        assert len(chosen) == len(responses)


def test_a_long_text_keeps_both_ends_and_says_what_is_gone() -> None:
    assert shorten("0123456789", 10) == ("0123456789", 0)
    assert shorten("0123456789", 5) == ("01\n[... 5 characters left out ...]\n789", 5)
    assert shorten("0123456789", 1) == ("\n[... 9 characters left out ...]\n9", 9)
    assert shorten("a\ud800b", 9) == ("a?b", 0), "UTF-8 has no lone surrogates: a write would fail"


def row(origin: str, response: str) -> SampleRow:
    return {"origin": origin, "response": response}


def found(folder: Path) -> list[tuple[int, str, str]]:
    return [(r["step"], r["origin"], r["response"]) for r in read_jsonl(folder / SAMPLES_FILE)]


def write(folder: Path, kept_step: int, steps: range, text: str) -> None:
    """The rows of these steps, each followed by an evaluation."""
    log = SampleLog(folder, kept_step)
    for step in steps:
        log.add(step, [row(TRAIN, text)])
        log.add_evaluation(step, [row(EVALUATION, text)])
    log.close()


def test_what_a_resumed_run_does_again_is_there_once(tmp_path: Path) -> None:
    write(tmp_path, -1, range(1, 4), "first")
    write(tmp_path, 2, range(3, 5), "again")
    assert found(tmp_path) == [
        (step, origin, "first" if step < 3 else "again") for step in range(1, 5) for origin in (TRAIN, EVALUATION)
    ]


@pytest.mark.parametrize("killed_before_evaluation", [False, True])
def test_the_evaluation_of_the_resumed_step_takes_the_place_of_the_earlier_one(
    tmp_path: Path, killed_before_evaluation: bool
) -> None:
    write(tmp_path, -1, range(1, 3), "first")
    log = SampleLog(tmp_path, 2)
    if killed_before_evaluation:
        log._file.truncate_after(1)
        log.add(2, [row(TRAIN, "first")])
    log.add_evaluation(2, [row(EVALUATION, "again")])
    log.close()
    assert found(tmp_path)[2:] == [(2, TRAIN, "first"), (2, EVALUATION, "again")]


def test_a_torn_line_does_not_keep_a_run_from_going_on(tmp_path: Path) -> None:
    write(tmp_path, -1, range(1, 3), "first")
    with (tmp_path / SAMPLES_FILE).open("a") as file:
        file.write('{"step": 3, "orig')
    write(tmp_path, 2, range(3, 4), "again")
    assert [step for step, _, _ in found(tmp_path)] == [1, 1, 2, 2, 3, 3]

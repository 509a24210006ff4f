"""Where the final answer of a response is found."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_tlt.rewards.extract import final_answer, marked_answer


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("8-2\n6\n#### 6", "6"),
        ("#### 6\nmore", "6"),
        ("#### 1\n#### 2", "2"),
        ("####7", "7"),
        ("##### 7", "7"),
        ("#### a b ", "a b"),
        ("6", None),
        ("#### ", None),
        ("####\n6", None),
        ("#### 6\n####", None),
        ("", None),
    ],
)
def test_marked(response: str, answer: str | None) -> None:
    assert marked_answer(response) == answer


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"so \boxed{6}.", "6"),
        (r"\boxed{\text{a}} " + "x" * 80 + r" \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1}, \boxed{2}", "1, 2"),
        (r"\boxed{1}, $\boxed{2}$ \text{ or } \(\boxed{3}\)", "1, 2, 3"),
        (r"\boxed{1}, so \boxed{2}", "2"),
        ("\\boxed{1},\n\\boxed{2}", "2"),
        (r"\boxed{2} and \boxed{2}", "2"),
        (r"\boxed{}, \boxed{2}", "2"),
        (r"\boxed{\boxed{2}}", "2"),
        (r"\boxed{1 and \boxed{2}", "2"),
        (r"\fbox{6}", "6"),
        (r"\boxed{6", ""),
        (r"\boxed{ }", ""),
        ("#### 1\n#### 2", "2"),
        ("#### 6\nmore", "6"),
        ("#### 6 apples\nmore", "6 apples"),
        ("#### Step 2\nmore", None),
        ("#### 2. Add\nmore", None),
        ("#### Paris", "Paris"),
        ("#### **Final answer:** 6\nmore", "6"),
        ("#### 6\n\\boxed{7}", "7"),
        ("\\boxed{7}\n#### 6", "6"),
        ("\\boxed{7}\n#### Check", "7"),
        ("6", None),
        ("", None),
    ],
)
def test_final(response: str, answer: str | None) -> None:
    assert final_answer(response) == answer


@given(st.text(), st.text(alphabet=st.characters(exclude_characters="#\n", exclude_categories=["Cs"])))
def test_any_text_before_the_marker_changes_nothing(before: str, answer: str) -> None:
    assert marked_answer(f"{before}\n#### {answer}\nafterwards") == (answer.strip() or None)

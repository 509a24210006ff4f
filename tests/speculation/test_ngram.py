"""The n-gram drafter against a direct search, and invariants of every token drafter."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_tlt.config.speculation import NgramConfig, SuffixConfig
from megatron_tlt.speculation.ngram import MIN_BYTES, NgramDrafter
from megatron_tlt.speculation.suffix import SuffixDrafter
from megatron_tlt.speculation.token_drafter import TokenDrafter


def latest(texts: Sequence[Sequence[tuple[int, int]]], gram: list[int], max_tokens: int) -> list[int]:
    """The continuation of a gram's latest occurrence; each token has the time at which it was generated."""
    found: tuple[int, list[int]] = (-1, [])
    for text in texts:
        tokens = [token for token, _ in text]
        for i in range(len(text) - len(gram)):
            if tokens[i : i + len(gram)] == gram:
                found = max(found, (text[i + len(gram)][1], tokens[i + len(gram) : i + len(gram) + max_tokens]))
    return found[1]


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("start"), st.integers(0, 1)),
        st.tuples(st.just("extend"), st.integers(0, 3), st.lists(st.integers(0, 3), min_size=1, max_size=20)),
        st.tuples(st.just("finish"), st.integers(0, 3)),
        st.tuples(st.just("learn"), st.integers(0, 1), st.lists(st.integers(0, 3), max_size=20)),
    ),
    max_size=40,
)


@settings(max_examples=200)
@given(OPERATIONS, st.integers(1, 3), st.integers(0, 3), st.integers(1, 7))
def test_it_finds_the_latest_of_the_longest(
    operations: list[tuple[Any, ...]], min_n: int, more: int, max_tokens: int
) -> None:
    max_n = min_n + more
    drafter = NgramDrafter(NgramConfig(prompt_lookup_min=min_n, prompt_lookup_max=max_n), max_draft=7)
    own: dict[int, list[tuple[int, int]]] = {}
    shared: dict[int, dict[int, list[tuple[int, int]]]] = {0: {}, 1: {}}
    problem_of: dict[int, int] = {}
    time = 0
    for number, operation in enumerate([("start", 0), *operations]):
        if operation[0] == "start":
            prompt = [(token, time := time + 1) for token in (0, 1, 2, operation[1])]
            drafter.start(str(number), f"problem {operation[1]}", [token for token, _ in prompt])
            own[number], problem_of[number] = list(prompt), operation[1]
            shared[operation[1]][number] = prompt[-max_n:]
        elif operation[0] == "learn":
            said = [(token, time := time + 1) for token in (0, 1, 2, operation[1], *operation[2])]
            drafter.learn(f"problem {operation[1]}", [token for token, _ in said[:4]], operation[2])
            shared[operation[1]][number] = said[max(0, 4 - max_n) :]
        elif own:
            chosen = sorted(own)[operation[1] % len(own)]
            if operation[0] == "extend":
                tokens = [(token, time := time + 1) for token in operation[2]]
                drafter.extend(str(chosen), operation[2])
                own[chosen] += tokens
                shared[problem_of[chosen]][chosen] += tokens
            else:
                drafter.finish(str(chosen))
                del own[chosen]
    for number, text in own.items():
        expected: tuple[list[int], int] = ([], 0)
        for size in range(min(max_n, len(text)), min_n - 1, -1):
            gram = [token for token, _ in text[-size:]]
            others = list(shared[problem_of[number]].values())
            tokens = latest([text], gram, max_tokens) or latest(others, gram, max_tokens)
            if tokens:
                expected = (tokens, size)
                break
        proposal = drafter.propose(str(number), max_tokens)
        assert (proposal.tokens, proposal.match_length) == expected


def test_another_sample_is_drafted_from_until_the_step_ends() -> None:
    drafter = NgramDrafter()
    drafter.start("a", "p", [1, 2])
    drafter.extend("a", [3, 4, 5, 6])
    drafter.start("b", "p", [1, 2])
    assert drafter.propose("b", 3).tokens == [3, 4, 5]
    drafter.finish("a")
    assert drafter.propose("b", 8).tokens == [3, 4, 5, 6]
    drafter.finish("b")
    drafter.begin_step()
    drafter.start("b", "p", [1, 2])
    assert drafter.propose("b", 8).tokens == []


def test_memory_stays_within_its_bound() -> None:
    drafter, rng = NgramDrafter(max_bytes=MIN_BYTES), random.Random(0)
    for number in range(200):
        for name in ("a", "b"):
            drafter.start(name, f"problem {number}", [rng.randrange(1000) for _ in range(20)])
        for _ in range(50):
            for name in ("a", "b"):
                drafter.extend(name, [rng.randrange(1000) for _ in range(20 if number else 200)])
                drafter.propose(name, 4)
            held = [problem.index for problem in drafter._problems.values()]
            held += [request.own for request in drafter._requests.values() if request.own is not None]
            assert drafter.memory_bytes == sum(index.nbytes for index in held) <= MIN_BYTES
        for name in ("a", "b"):
            drafter.finish(name)
    counters = drafter.counters()
    assert counters["problems_evicted"] > 0
    assert 0 < counters["requests_not_recorded"] + counters["own_indexes_dropped"] <= 4, (
        "the first two alone are too long"
    )


DRAFTERS: list[Callable[[], TokenDrafter]] = [
    NgramDrafter,
    lambda: NgramDrafter(NgramConfig(prompt_lookup_min=1, prompt_lookup_max=8), 3),
    SuffixDrafter,
    lambda: SuffixDrafter(SuffixConfig(scope="global", own_tree=False), prompt_tokens=0),
    lambda: SuffixDrafter(SuffixConfig(max_bytes=1 << 20)),
]


@pytest.mark.parametrize("make", DRAFTERS)
@settings(max_examples=30)
@given(seed=st.integers(0, 10**6))
def test_proposals_are_valid_and_deterministic(make: Callable[[], TokenDrafter], seed: int) -> None:
    """Never longer than requested, only of tokens seen, and equal for equal histories."""
    drafters, rng = [make(), make()], random.Random(seed)
    seen = set()
    for number in range(6):
        prompt = [rng.randrange(0, 5000, 7) for _ in range(rng.randrange(20))]
        seen.update(prompt)
        for drafter in drafters:
            drafter.start(str(number), f"problem {number % 2}", prompt)
        phrase = [rng.randrange(0, 5000, 7) for _ in range(9)]
        for _ in range(rng.randrange(30)):
            tokens = phrase[rng.randrange(4) :]
            seen.update(tokens)
            for drafter in drafters:
                drafter.extend(str(number), tokens)
            for max_tokens in (0, 1, rng.randrange(40), 100):
                first, second = (drafter.propose(str(number), max_tokens) for drafter in drafters)
                assert first == second
                assert len(first.tokens) <= max_tokens
                assert set(first.tokens) <= seen
                assert all(type(token) is int for token in first.tokens)
                assert 0.0 <= first.score <= len(first.tokens)
        if rng.random() < 0.7:
            for drafter in drafters:
                drafter.finish(str(number))
                drafter.learn(f"problem {number % 2}", prompt, phrase)
                drafter.begin_step()
            seen.update(phrase)


@pytest.mark.parametrize("make", DRAFTERS)
def test_bad_use_is_refused(make: Callable[[], TokenDrafter]) -> None:
    drafter = make()
    drafter.start("a", "p", [1])
    with pytest.raises(ValueError, match="'a' has been started already"):
        drafter.start("a", "p", [1])
    with pytest.raises(ValueError, match="allowed: 0 to"):
        drafter.start("b", "p", [-5])
    with pytest.raises(ValueError, match="allowed: 0 to"):
        drafter.extend("a", [3, -1])
    with pytest.raises(ValueError, match="allowed: 0 to"):
        drafter.learn("p", [1], [3, -1])
    for call in (lambda: drafter.extend("b", [1]), lambda: drafter.propose("b", 1), lambda: drafter.finish("b")):
        with pytest.raises(KeyError):
            call()


@pytest.mark.parametrize("bad", [{"config": NgramConfig(prompt_lookup_min=5)}, {"max_draft": 0}, {"max_bytes": 5}])
def test_bad_configs_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="allowed"):
        NgramDrafter(**bad)

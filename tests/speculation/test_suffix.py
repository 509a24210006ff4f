"""The suffix drafter: problems, epochs, bounded memory, its file."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_tlt.errors import RunError
from megatron_tlt.speculation.suffix import MIN_BYTES, SuffixConfig, SuffixDrafter
from megatron_tlt.speculation.suffix_history import EpochWeights
from megatron_tlt.speculation.suffix_tree import SpeculationRule
from megatron_tlt.speculation.token_drafter import Proposal, TokenDrafter
from tests.speculation.reference import Reference

EAGER = SpeculationRule(factor=1.0, offset=8.0, min_probability=0.0)


def say(drafter: TokenDrafter, name: str, problem: str, response: list[int], prompt: tuple[int, ...] = (1, 2)) -> None:
    """A whole request, token by token."""
    drafter.start(name, problem, prompt)
    for token in response:
        drafter.extend(name, [token])
    drafter.finish(name)


def draft(drafter: TokenDrafter, problem: str, begin: list[int], max_tokens: int = 8) -> Proposal:
    """What a request that has said ``begin`` would be offered; its response is kept like any other."""
    drafter.start("probe", problem, [1, 2])
    drafter.extend("probe", begin)
    proposal = drafter.propose("probe", max_tokens)
    drafter.finish("probe")
    return proposal


def test_a_response_is_drafted_like_earlier_ones_to_its_prompt_only() -> None:
    drafter = SuffixDrafter(SuffixConfig(rule=EAGER))
    say(drafter, "a", "p", [10, 11, 12, 13, 14])
    assert draft(drafter, "p", []).tokens == [10, 11, 12, 13, 14], "the prompt's end matches"
    assert draft(drafter, "p", [10, 11]).tokens == [12, 13, 14]
    assert draft(drafter, "q", [10, 11]).tokens == []
    everywhere = SuffixDrafter(SuffixConfig(scope="global", rule=EAGER))
    say(everywhere, "a", "p", [10, 11, 12, 13, 14])
    assert draft(everywhere, "q", [10, 11]).tokens == [12, 13, 14]


def test_samples_that_decode_now_learn_from_each_other() -> None:
    drafter = SuffixDrafter(SuffixConfig(rule=EAGER))
    for name in ("ahead", "behind"):
        drafter.start(name, "p", [1, 2])
    drafter.extend("ahead", [10, 11, 12, 13])
    drafter.extend("behind", [10])
    assert drafter.propose("behind", 2).tokens == [11, 12]
    assert drafter.propose("ahead", 2).tokens == []


def test_a_prompt_is_drafted_from_where_the_request_has_its_own_tree() -> None:
    for own_tree, tokens in ((True, [32, 33]), (False, [])):
        drafter = SuffixDrafter(SuffixConfig(own_tree=own_tree, prompt_tokens=1, rule=EAGER))
        drafter.start("a", "p", [30, 31, 32, 33, 2])
        drafter.extend("a", [30, 31])
        assert drafter.propose("a", 2).tokens == tokens


def test_newer_epochs_weigh_more_and_old_ones_go() -> None:
    drafter = SuffixDrafter(SuffixConfig(window=2, epoch_decay=0.5, own_tree=False, rule=EAGER))
    say(drafter, "old", "p", [5, 6])
    drafter.end_epoch()
    say(drafter, "new", "p", [5, 7])
    drafter.start("probe", "p", [])
    drafter.extend("probe", [5])
    proposal = drafter.propose("probe", 1)
    assert (proposal.tokens, proposal.score) == ([7], pytest.approx(2 / 3))
    drafter.finish("probe")
    drafter.end_epoch()
    drafter.end_epoch()  # the old one is three epochs back, the new one two
    assert draft(drafter, "p", [5], 1) == Proposal([7], 1.0, 3)
    for _ in range(3):
        drafter.end_epoch()
    assert drafter.memory_bytes == 0


@settings(deadline=None)
@given(st.floats(0.5, 1.0), st.integers(0, 3000), st.integers(0, 12), st.randoms(use_true_random=False))
def test_sums_of_weights_are_exact(decay: float, epoch: int, window: int, rng: random.Random) -> None:
    weights = EpochWeights(decay)
    exponent = weights.exponent(epoch)
    added = [weights.weight(epoch + rng.randint(0, window), exponent) for _ in range(500)]
    total = 0.0
    for weight in added:
        total += weight
    rng.shuffle(added)
    for weight in added:
        total -= weight
    assert total == 0.0
    assert weights.weight(epoch, exponent) / weights.weight(epoch + 1, exponent) == pytest.approx(decay, rel=1e-3)


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("start"), st.integers(0, 1)),
        st.tuples(st.just("extend"), st.integers(0, 3), st.lists(st.integers(0, 2), min_size=1, max_size=9)),
        st.tuples(st.just("finish"), st.integers(0, 3)),
        st.tuples(st.just("epoch")),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(OPERATIONS, st.sampled_from([0, 1, 3]), st.sampled_from([0.5, 0.8, 1.0]), st.booleans())
def test_proposals_are_those_of_counting_by_hand(
    operations: list[tuple[Any, ...]], window: int, decay: float, own_tree: bool
) -> None:
    config = SuffixConfig(max_depth=6, window=window, epoch_decay=decay, prompt_tokens=2, own_tree=own_tree, rule=EAGER)
    drafter, weights = SuffixDrafter(config), EpochWeights(decay)
    problems = [Reference(6), Reference(6)]
    epochs: dict[int, int] = {}
    decoding: dict[int, tuple[int, Reference]] = {}
    for number, operation in enumerate([("start", 0), *operations]):
        if operation[0] == "start":
            prompt = [0, 1, operation[1]]
            drafter.start(str(number), f"problem {operation[1]}", prompt)
            problems[operation[1]].sequences[number] = (prompt[-2:], weights.weight(drafter.epoch, 0))
            problems[operation[1]].growing.add(number)
            epochs[number] = drafter.epoch
            decoding[number] = (operation[1], Reference(6, {number: (list(prompt), 1.0)}, {number}))
        elif operation[0] == "epoch":
            drafter.end_epoch()
            for problem in problems:
                for old in set(problem.sequences) - problem.growing:
                    if epochs[old] < drafter.epoch - window:
                        del problem.sequences[old]
        elif decoding:
            chosen = sorted(decoding)[operation[1] % len(decoding)]
            problem, own = decoding[chosen]
            if operation[0] == "extend":
                drafter.extend(str(chosen), operation[2])
                problems[problem].sequences[chosen][0].extend(operation[2])
                own.sequences[chosen][0].extend(operation[2])
            else:
                drafter.finish(str(chosen))
                problems[problem].growing.remove(chosen)
                del decoding[chosen]
    for number, (problem, own) in decoding.items():
        proposal = drafter.propose(str(number), 4)
        expected = problems[problem].propose(number, 4, EAGER)
        alone = own.propose(number, 4, EAGER)
        if own_tree and alone[1] > expected[1] + 1e-9 and alone[2] > expected[2]:
            expected = alone
        assert proposal.tokens == expected[0]
        assert proposal.score == pytest.approx(expected[1])


def held_bytes(drafter: SuffixDrafter) -> int:
    """Counted anew, structure by structure."""
    own = sum(request.own.nbytes for request in drafter._requests.values() if request.own is not None)
    return own + sum(history.nbytes for history in drafter._problems.values())


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["problem", "global"]))
def test_memory_stays_within_its_bound(seed: int, scope: str) -> None:
    rng = random.Random(seed)
    drafter = SuffixDrafter(SuffixConfig(scope=scope, max_bytes=MIN_BYTES, window=3))
    last = {}
    for number in range(120):
        names = [f"{number}/{sample}" for sample in range(rng.randint(1, 3))]
        for name in names:
            drafter.start(name, f"problem {number % 40}", [rng.randrange(1000) for _ in range(20)])
        for _ in range(rng.randint(1, 40)):
            for name in names:
                tokens = [rng.randrange(1000) for _ in range(rng.randint(1, 9))]
                drafter.extend(name, tokens)
                drafter.propose(name, 4)
                last[name] = tokens
            assert drafter.memory_bytes <= MIN_BYTES
        assert drafter.memory_bytes == held_bytes(drafter)
        for name in names:
            drafter.finish(name)
        assert drafter.memory_bytes == held_bytes(drafter) <= MIN_BYTES
        if number % 40 == 39:
            drafter.end_epoch()
    counters = drafter.counters()
    assert counters["requests_not_recorded"] == 0, "there was always something older to evict"
    if scope == "global":
        assert counters["responses_evicted"] > 0
    else:
        assert counters["trees_cooled"] > 0
    tree = drafter._problems["" if scope == "global" else "problem 39"].tree
    assert tree is not None
    assert all(tree.count(last[name]) > 0 for name in names), "the latest is there"


def test_what_cannot_fit_goes_without() -> None:
    drafter = SuffixDrafter(SuffixConfig(max_bytes=MIN_BYTES))
    rng = random.Random(0)
    drafter.start("a", "p", [1])
    for _ in range(300):
        drafter.extend("a", [rng.randrange(10**6) for _ in range(100)])
        assert drafter.memory_bytes <= MIN_BYTES
        assert drafter.memory_bytes == held_bytes(drafter)
    assert drafter.counters()["requests_not_recorded"] == drafter.counters()["own_trees_dropped"] == 1
    assert drafter.propose("a", 8).tokens == []
    drafter.finish("a")
    assert drafter.memory_bytes == 0


def test_a_tree_given_up_comes_back_the_same() -> None:
    drafter = SuffixDrafter(SuffixConfig(rule=EAGER))
    rng = random.Random(1)
    for epoch in range(3):
        for sample in range(3):
            say(drafter, f"{epoch}/{sample}", "p", [rng.randrange(3) for _ in range(100)])
        drafter.end_epoch()
    contexts = [[rng.randrange(3) for _ in range(5)] for _ in range(20)]

    def proposals() -> list[Proposal]:
        found = []
        for context in contexts:
            drafter.start("probe", "p", [])
            drafter.extend("probe", context)
            found.append(drafter.propose("probe", 8))
            history = drafter._problems["p"]
            history.discard(drafter._requests["probe"].handle)
            drafter._requests["probe"].handle = None
            drafter.finish("probe")
        return found

    before = proposals()
    drafter._problems["p"].cool()
    assert drafter._problems["p"].tree is None
    assert proposals() == before
    assert any(proposal.tokens for proposal in before)


def filled(seed: int = 0) -> SuffixDrafter:
    drafter, rng = SuffixDrafter(SuffixConfig(window=4, rule=EAGER)), random.Random(seed)
    for _ in range(3):
        for problem in range(3):
            for sample in range(2):
                say(drafter, f"{sample}", f"problem {problem}", [rng.randrange(4) for _ in range(30)])
        drafter.end_epoch()
    return drafter


def contents(drafter: SuffixDrafter) -> tuple[Any, ...]:
    held = {
        key: [(epoch, tokens.tolist()) for epoch, tokens in history.sequences()]
        for key, history in drafter._problems.items()
    }
    return drafter.epoch, held


def test_it_comes_back_from_its_file(tmp_path: Path) -> None:
    drafter = filled()
    drafter.save(tmp_path / "suffix.bin")
    restored = SuffixDrafter(drafter.config)
    restored.load(tmp_path / "suffix.bin")
    assert contents(restored) == contents(drafter)
    assert restored.memory_bytes == held_bytes(restored) < drafter.memory_bytes
    rng = random.Random(5)
    for _ in range(20):
        problem, context = f"problem {rng.randrange(4)}", [rng.randrange(4) for _ in range(6)]
        assert draft(restored, problem, context) == draft(drafter, problem, context)
    assert [path.name for path in tmp_path.iterdir()] == ["suffix.bin"]


def test_a_file_is_loaded_under_another_window_and_scope(tmp_path: Path) -> None:
    drafter = filled()
    drafter.save(tmp_path / "suffix.bin")
    narrow = SuffixDrafter(replace(drafter.config, window=1, scope="global"))
    narrow.load(tmp_path / "suffix.bin")
    _, held = contents(narrow)
    assert {epoch for epoch, _ in held[""]} == {2}
    assert len(held[""]) == 6


DAMAGE = st.one_of(
    st.tuples(st.just("cut"), st.floats(0.0, 1.0, exclude_max=True)),
    st.tuples(st.just("flip"), st.floats(0.0, 1.0, exclude_max=True), st.integers(0, 7)),
    st.tuples(st.just("more"), st.binary(min_size=1, max_size=9)),
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(DAMAGE)
def test_a_damaged_file_is_refused_and_nothing_of_it_is_loaded(tmp_path: Path, damage: tuple[Any, ...]) -> None:
    path = tmp_path / "suffix.bin"
    if not path.exists():
        filled().save(tmp_path / "whole.bin")
        path.touch()
    data = bytearray((tmp_path / "whole.bin").read_bytes())
    if damage[0] == "cut":
        data = data[: int(damage[1] * len(data))]
    elif damage[0] == "flip":
        data[int(damage[1] * len(data))] ^= 1 << damage[2]
    else:
        data += damage[1]
    path.write_bytes(data)
    drafter = filled(seed=1)
    before = contents(drafter)
    with pytest.raises(RunError, match=r"suffix\.bin"):
        drafter.load(path)
    assert contents(drafter) == before


def test_a_file_of_the_future_and_a_missing_one_say_so(tmp_path: Path) -> None:
    drafter = filled()
    path = tmp_path / "suffix.bin"
    with pytest.raises(RunError, match="cannot read"):
        drafter.load(path)
    drafter.save(path)
    data = path.read_bytes()
    path.write_bytes(data[:7] + b"9" + data[8:])
    with pytest.raises(RunError, match=r"version b'9'.*allowed: b'1'"):
        drafter.load(path)


def test_nothing_is_loaded_while_requests_decode(tmp_path: Path) -> None:
    drafter = filled()
    drafter.save(tmp_path / "suffix.bin")
    drafter.start("a", "p", [1])
    with pytest.raises(ValueError, match="1 requests decode"):
        drafter.load(tmp_path / "suffix.bin")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"scope": "world"}, "scope 'world'; allowed: problem, global"),
        ({"window": -1}, "window is -1"),
        ({"max_bytes": 10}, "max_bytes is 10"),
        ({"epoch_decay": 0.5, "window": 13}, "at least 1/4096"),
        ({"epoch_decay": 0.0}, "above 0"),
    ],
)
def test_bad_configs_are_refused(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SuffixConfig(**bad)

"""The suffix drafter: problems, epochs, bounded memory."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_tlt.config.speculation import SuffixConfig
from megatron_tlt.speculation.suffix import SuffixDrafter
from megatron_tlt.speculation.suffix_history import EpochWeights
from megatron_tlt.speculation.token_drafter import FinishedResponse, Proposal
from tests.speculation.reference import Reference
from tests.speculation.suffix_requests import EAGER, EAGER_KEYS, MIN_BYTES, draft, held_bytes, say, visit


def test_a_response_is_drafted_like_earlier_ones_to_its_prompt_only() -> None:
    drafter = SuffixDrafter(SuffixConfig(**EAGER_KEYS))
    say(drafter, "a", "p", [10, 11, 12, 13, 14])
    assert draft(drafter, "p", []).tokens == [10, 11, 12, 13, 14], "the prompt's end matches"
    assert draft(drafter, "p", [10, 11]).tokens == [12, 13, 14]
    assert draft(drafter, "q", [10, 11]).tokens == []
    everywhere = SuffixDrafter(SuffixConfig(scope="global", **EAGER_KEYS))
    say(everywhere, "a", "p", [10, 11, 12, 13, 14])
    assert draft(everywhere, "q", [10, 11]).tokens == [12, 13, 14]


def test_running_samples_share_their_history() -> None:
    drafter = SuffixDrafter(SuffixConfig(**EAGER_KEYS))
    for name in ("ahead", "behind"):
        drafter.start(name, "p", [1, 2])
    drafter.extend("ahead", [10, 11, 12, 13])
    drafter.extend("behind", [10])
    assert drafter.propose("behind", 2).tokens == [11, 12]
    assert drafter.propose("ahead", 2).tokens == []


def test_a_prompt_is_drafted_from_where_the_request_has_its_own_tree() -> None:
    for own_tree, tokens in ((True, [32, 33]), (False, [])):
        drafter = SuffixDrafter(SuffixConfig(own_tree=own_tree, **EAGER_KEYS), prompt_tokens=1)
        drafter.start("a", "p", [30, 31, 32, 33, 2])
        drafter.extend("a", [30, 31])
        assert drafter.propose("a", 2).tokens == tokens


def test_newer_epochs_weigh_more_and_old_ones_are_dropped() -> None:
    drafter = SuffixDrafter(SuffixConfig(window=2, epoch_decay=0.5, own_tree=False, **EAGER_KEYS))
    visit(drafter, ("p", [5, 6]))
    say(drafter, "new", "p", [5, 7])
    drafter.start("probe", "p", [])
    drafter.extend("probe", [5])
    proposal = drafter.propose("probe", 1)
    assert (proposal.tokens, proposal.score) == ([7], pytest.approx(2 / 3))
    drafter.finish("probe")
    drafter.end_rollout([FinishedResponse("p", [1, 2], [5, 7])])
    for _ in range(9):
        visit(drafter, ("q", [8, 9]))  # does not age p
    assert draft(drafter, "p", [5], 1) == Proposal([7], pytest.approx(2 / 3), 3)
    visit(drafter, ("p", [3, 4]))  # then the old response is three visits back, the new one two
    assert draft(drafter, "p", [5], 1) == Proposal([7], 1.0, 3)
    for _ in range(2):
        visit(drafter, ("p", [3, 4]))
    assert draft(drafter, "p", [5], 1).tokens == []


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
        st.tuples(st.just("learn"), st.integers(0, 1), st.lists(st.integers(0, 2), max_size=9)),
        st.tuples(st.just("elsewhere"), st.integers(0, 1), st.lists(st.integers(0, 2), max_size=9)),
        st.tuples(st.just("end")),
    ),
    max_size=40,
)


@settings(max_examples=150)
@given(OPERATIONS, st.sampled_from([0, 1, 3]), st.sampled_from([0.5, 0.8, 1.0]), st.booleans(), st.booleans())
def test_proposals_are_those_of_counting_by_hand(
    operations: list[tuple[Any, ...]], window: int, decay: float, own_tree: bool, everywhere: bool
) -> None:
    """Two problems, in one tree each or in a common one; other engines' responses count from the rollout's end."""
    config = SuffixConfig(
        scope="global" if everywhere else "problem",
        max_depth=6,
        window=window,
        epoch_decay=decay,
        own_tree=own_tree,
        **EAGER_KEYS,
    )
    drafter, weights = SuffixDrafter(config, prompt_tokens=2), EpochWeights(decay)
    recorded: list[tuple[int, int, list[int]]] = []  # problem, visit, tokens
    running: dict[int, tuple[int, list[int]]] = {}
    elsewhere: list[tuple[int, list[int]]] = []
    growing: dict[int, int] = {}

    def prompt(problem: int) -> list[int]:
        return [0, 1, problem]

    def newest(problem: int) -> int:
        return max((visit for of, visit, _ in recorded if of == problem), default=0)

    def check() -> None:
        counted = Reference(6, growing=set(growing))
        for number, problem in growing.items():
            counted.sequences.clear()
            past = {-1 - i: entry for i, entry in enumerate(recorded)}
            # in a tree of all problems the running visit has the weight of the newest one
            now = {handle: (of, newest(of) + (not everywhere), tokens) for handle, (of, tokens) in running.items()}
            for handle, (of, since, tokens) in (past | now).items():
                if everywhere or of == problem:
                    epoch = since - newest(of) if everywhere else since
                    counted.sequences[handle] = ([*prompt(of)[-2:], *tokens], weights.weight(epoch, 0))
            proposal, expected = drafter.propose(str(number), 4), counted.propose(number, 4, EAGER)
            own = Reference(6, {number: ([*prompt(problem), *running[number][1]], 1.0)}, {number})
            alone = own.propose(number, 4, EAGER)
            if own_tree and alone[1] > expected[1] + 1e-9 and alone[2] > expected[2]:
                expected = alone
            assert proposal.tokens == expected[0]
            assert proposal.score == pytest.approx(expected[1])

    for number, operation in enumerate([("start", 0), *operations]):
        kind, *rest = operation
        if kind == "start":
            drafter.start(str(number), f"problem {rest[0]}", prompt(rest[0]))
            running[number] = (rest[0], [])
            growing[number] = rest[0]
        elif kind == "learn":
            drafter.learn(f"problem {rest[0]}", prompt(rest[0]), rest[1])
            running[number] = (rest[0], rest[1])
        elif kind == "elsewhere":
            elsewhere.append((rest[0], rest[1]))
        elif kind == "end":
            check()
            for name in growing:
                drafter.finish(str(name))
            growing.clear()
            ended = [*running.values(), *elsewhere]
            drafter.end_rollout(FinishedResponse(f"problem {of}", prompt(of), tokens) for of, tokens in ended)
            visits = {of: newest(of) + 1 for of, _ in ended}
            recorded += [(of, visits[of], tokens) for of, tokens in ended]
            recorded = [entry for entry in recorded if entry[1] >= newest(entry[0]) + 1 - window]
            running.clear()
            elsewhere.clear()
        elif growing:
            chosen = sorted(growing)[rest[0] % len(growing)]
            if kind == "extend":
                drafter.extend(str(chosen), rest[1])
                running[chosen][1].extend(rest[1])
            else:
                drafter.finish(str(chosen))
                del growing[chosen]
    check()


@settings(max_examples=10)
@example(7, "global")
@given(st.integers(0, 10**6), st.sampled_from(["problem", "global"]))
def test_memory_stays_within_its_bound(seed: int, scope: str) -> None:
    """Each problem is in three of 120 rollouts, often with a long response of another engine."""
    rng, bound = random.Random(seed), 2 * MIN_BYTES
    drafter = SuffixDrafter(SuffixConfig(scope=scope, max_bytes=bound, window=6))
    for number in range(120):
        names = [f"{number}/{sample}" for sample in range(rng.randint(1, 3))]
        said: dict[str, list[int]] = {name: [] for name in names}
        for name in names:
            drafter.start(name, f"problem {number % 40}", [rng.randrange(1000) for _ in range(20)])
        for _ in range(rng.randint(1, 40)):
            for name in names:
                tokens = [rng.randrange(1000) for _ in range(rng.randint(1, 9))]
                drafter.extend(name, tokens)
                drafter.propose(name, 4)
                said[name] += tokens
            assert drafter.memory_bytes <= bound
        assert drafter.memory_bytes == held_bytes(drafter)
        if number == 119:
            tree = drafter._trees["" if scope == "global" else "problem 39"].tree
            assert tree is not None
            assert all(tree.count(tokens[-9:]) > 0 for tokens in said.values()), "the latest is there"
        for name in names:
            drafter.finish(name)
        drafter.learn("problem 0", [1], [rng.randrange(1000) for _ in range(300)])
        assert drafter.memory_bytes == held_bytes(drafter) <= bound
        responses = [FinishedResponse(f"problem {number % 40}", [1, 2], tokens) for tokens in said.values()]
        elsewhere = [rng.randrange(1000) for _ in range(5000)]
        drafter.end_rollout([*responses, FinishedResponse(f"problem {(number + 3) % 40}", [1, 2], elsewhere)])
        assert drafter.memory_bytes == held_bytes(drafter) <= bound
        assert drafter._store.nbytes <= bound // 2
    counters = drafter.counters()
    assert counters["requests_not_recorded"] == 0, "there was always something older to evict"
    assert counters["responses_evicted"] > 0
    assert counters["responses_left_out" if scope == "global" else "trees_released"] > 0


def test_responses_that_cannot_fit_are_not_recorded() -> None:
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


@pytest.mark.parametrize("scope", ["problem", "global"])
def test_an_evicted_tree_is_rebuilt_identically(scope: str) -> None:
    drafter = SuffixDrafter(SuffixConfig(scope=scope, **EAGER_KEYS))
    rng = random.Random(1)
    for _ in range(3):
        visit(drafter, *(("p", [rng.randrange(3) for _ in range(100)]) for _ in range(3)))
    say(drafter, "running", "p", [rng.randrange(3) for _ in range(100)])
    contexts = [[rng.randrange(3) for _ in range(5)] for _ in range(20)]
    tree = drafter._trees["p" if scope == "problem" else ""]

    def proposals() -> list[Proposal]:
        found = []
        for context in contexts:
            drafter.start("probe", "p", [])
            drafter.extend("probe", context)
            found.append(drafter.propose("probe", 8))
            handle = drafter._requests["probe"].handle
            assert handle is not None
            tree.discard(handle)
            drafter._requests["probe"].handle = None
            drafter.finish("probe")
        return found

    before = proposals()
    tree.release()
    assert tree.tree is None
    assert proposals() == before
    assert any(proposal.tokens for proposal in before)


def test_only_recorded_responses_stay() -> None:
    """Unfinished requests, and problems that do not return, are drafted from until the rollout ends."""
    drafter = SuffixDrafter(SuffixConfig(**EAGER_KEYS))
    for name, tokens in (("given up", [10, 11, 12]), ("whole", [20, 21, 22])):
        say(drafter, name, "p", tokens)
    drafter.learn("p", [1, 2], [30, 31, 32])
    drafter.learn("q", [1, 2], [40, 41, 42])
    assert [draft(drafter, "p", [first]).tokens for first in (10, 20, 30)] == [[11, 12], [21, 22], [31, 32]]
    assert draft(drafter, "q", [40]).tokens == [41, 42]
    drafter.end_rollout([FinishedResponse("p", (1, 2), (20, 21, 22)), FinishedResponse("p", (1, 2), (50, 51))])
    assert [draft(drafter, "p", [first]).tokens for first in (10, 20, 30, 50)] == [[], [21, 22], [], [51]]
    assert draft(drafter, "q", [40]).tokens == []


def test_a_response_that_an_engine_decoded_itself_counts_once() -> None:
    """It has the same weight as the other engine's: the proposal is as uncertain as on a third engine."""
    responses = [FinishedResponse("p", (1, 2), tokens) for tokens in ((5, 6), (5, 7), (5, 7))]
    drafters = [SuffixDrafter(SuffixConfig(own_tree=False, **EAGER_KEYS)) for _ in range(3)]
    for drafter, own in zip(drafters, (responses[:1], responses[1:], []), strict=True):
        for i, (problem, prompt, tokens) in enumerate(own):
            say(drafter, str(i), problem, list(tokens), tuple(prompt))
        drafter.end_rollout(responses)
        assert draft(drafter, "p", [5], 1) == Proposal([7], pytest.approx(2 / 3), 3)
    assert len({tuple(stored.tokens.tobytes() for stored in drafter._store) for drafter in drafters}) == 1


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"scope": "world"}, "'problem' or 'global'"),
        ({"window": -1}, "greater than or equal to 0"),
        ({"max_bytes": 10}, "greater than or equal to 1048576"),
        ({"epoch_decay": 0.5, "window": 13}, "at least 1/4096"),
        ({"epoch_decay": 0.0}, "greater than 0"),
    ],
)
def test_bad_configs_are_refused(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SuffixConfig(**bad)


def test_a_draft_ends_before_tokens_below_the_least_probability() -> None:
    drafter = SuffixDrafter(SuffixConfig(own_tree=False, **EAGER_KEYS))
    for name, last in (("a", 7), ("b", 7), ("c", 8), ("d", 9)):
        say(drafter, name, "p", [5, 6, last, 4])
    drafter.start("probe", "p", [])
    drafter.extend("probe", [5])
    assert drafter.propose("probe", 3, 0.4).tokens == [6, 7, 4]
    assert drafter.propose("probe", 3, 0.6).tokens == [6]

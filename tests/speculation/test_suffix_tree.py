"""The suffix tree against direct counting."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_tlt.speculation.suffix_tree import MAX_TOKEN, OutOfMemoryBudget, SpeculationRule, SuffixTree
from tests.speculation.reference import Reference


def check_counts(tree: SuffixTree, reference: Reference) -> None:
    """Check every string that occurs, and each with one token changed."""
    strings = {
        tuple(tokens[i : i + length])
        for tokens, _ in reference.sequences.values()
        for i in range(len(tokens))
        for length in range(1, reference.max_depth + 1)
        if i + length <= len(tokens)
    }
    strings |= {(*string[:-1], 7) for string in strings}
    for string in strings:
        assert tree.count(string) == reference.count(string), string


RULES = st.builds(
    SpeculationRule,
    factor=st.sampled_from([0.5, 1.0, 2.0]),
    offset=st.sampled_from([0.5, 1.0, 4.0]),
    min_probability=st.sampled_from([0.0, 0.1, 0.5]),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("start"), st.sampled_from([0.25, 1.0, 1.5])),
        st.tuples(st.just("append"), st.integers(0, 5), st.lists(st.integers(0, 2), min_size=1, max_size=12)),
        st.tuples(st.just("copy"), st.integers(0, 5), st.integers(0, 5)),
        st.tuples(st.just("finish"), st.integers(0, 5)),
        st.tuples(st.just("remove"), st.lists(st.integers(0, 9), min_size=1, max_size=3)),
    ),
    max_size=40,
)


@settings(max_examples=300)
@given(STEPS, st.sampled_from([2, 3, 5, 8]), RULES)
def test_counts_and_proposals_are_exact(steps: list[tuple], max_depth: int, rule: SpeculationRule) -> None:
    tree, reference = SuffixTree(max_depth), Reference(max_depth)
    for step in [("start", 1.0), *steps]:
        growing = sorted(reference.growing)
        if step[0] == "start":
            handle = tree.start(step[1])
            reference.sequences[handle] = ([], step[1])
            reference.growing.add(handle)
        elif step[0] == "remove":
            there = sorted(reference.sequences)
            chosen = {there[i % len(there)] for i in step[1]} if there else set()
            tree.remove(chosen)
            for handle in chosen:
                del reference.sequences[handle]
            reference.growing -= chosen
        elif growing:
            handle = growing[step[1] % len(growing)]
            if step[0] == "finish":
                tree.finish(handle)
                reference.growing.remove(handle)
            else:
                source = sorted(reference.sequences)
                tokens = step[2] if step[0] == "append" else reference.sequences[source[step[2] % len(source)]][0][:15]
                tree.append(handle, tokens)
                reference.sequences[handle][0].extend(tokens)
    check_counts(tree, reference)
    for handle in reference.growing:
        for max_tokens in (1, 3, 8):
            proposal = tree.propose(handle, max_tokens, rule)
            tokens, score, match_length = reference.propose(handle, max_tokens, rule)
            assert proposal.tokens == tokens
            assert proposal.score == pytest.approx(score, rel=1e-12)
            assert proposal.match_length == match_length
    for handle, (tokens, _) in reference.sequences.items():
        assert tree.tokens(handle).tolist() == tokens
    tree.remove(list(reference.sequences))
    assert (tree.num_nodes, tree.num_tokens) == (1, 0), "nothing is left of what was removed"


@settings(max_examples=60)
@given(st.integers(0, 10**9), st.sampled_from([3, 5, 8]), st.sampled_from([2, 3, 40]))
def test_sequences_that_grow_side_by_side_and_go(seed: int, max_depth: int, vocabulary: int) -> None:
    """A few tokens at a time, mostly copied from another sequence, so that windows follow and overtake each other."""
    rng = random.Random(seed)
    rule = SpeculationRule(factor=1.0, offset=3.0, min_probability=0.0)
    tree, reference = SuffixTree(max_depth), Reference(max_depth)
    copying: dict[int, tuple[int, int]] = {}  # the copied sequence and position

    def step() -> None:
        action = rng.random()
        growing = sorted(reference.growing)
        if (action < 0.1 and len(growing) < 4) or not growing:
            weight = rng.choice([0.5, 1.0, 1.0])
            handle = tree.start(weight)
            reference.sequences[handle] = ([], weight)
            reference.growing.add(handle)
        elif action < 0.15:
            handle = rng.choice(growing)
            tree.finish(handle)
            reference.growing.remove(handle)
        elif action < 0.22:
            handle = rng.choice(sorted(reference.sequences))
            tree.remove([handle])
            del reference.sequences[handle]
            reference.growing.discard(handle)
        else:
            handle = rng.choice(growing)
            tokens = [next_token(handle) for _ in range(rng.randint(1, 3))]
            tree.append(handle, tokens)

    def next_token(handle: int) -> int:
        said = reference.sequences[handle][0]
        other, at = copying.get(handle, (handle, 0))
        if other not in reference.sequences or at >= len(reference.sequences[other][0]) or rng.random() < 0.1:
            other = rng.choice(sorted(reference.sequences))
            at = rng.randrange(len(reference.sequences[other][0]) + 1)
        text = reference.sequences[other][0]
        token = text[at] if at < len(text) and rng.random() < 0.9 else rng.randrange(vocabulary)
        copying[handle] = (other, at + 1)
        said.append(token)
        return token

    for number in range(150):
        step()
        if number % 5 == 0:
            for handle in reference.growing:
                proposal = tree.propose(handle, 4, rule)
                tokens, score, match_length = reference.propose(handle, 4, rule)
                assert (proposal.tokens, proposal.match_length) == (tokens, match_length)
                assert proposal.score == pytest.approx(score, rel=1e-12)
    check_counts(tree, reference)
    tree.remove(list(reference.sequences))
    assert tree.num_nodes == 1


def test_removing_a_branch_leaves_both_windows_on_one_edge() -> None:
    """The lower window was alone on its leaf; now another one may catch up with it."""
    tree = SuffixTree(8)
    gone, ahead, behind = (tree.start() for _ in range(3))
    for handle, tokens in ((gone, [1, 2, 9]), (ahead, [1, 2, 3]), (behind, [1, 2])):
        tree.append(handle, tokens)
    tree.remove([gone])
    for handle, token in ((behind, 3), (behind, 4), (ahead, 5)):
        tree.append(handle, [token])
    said = {ahead: ([1, 2, 3, 5], 1.0), behind: ([1, 2, 3, 4], 1.0)}
    check_counts(tree, Reference(8, said, {ahead, behind}))


def test_tokens_out_of_range_are_refused_and_nothing_is_added() -> None:
    tree = SuffixTree()
    handle = tree.start()
    for bad in ([1, -1], [1, MAX_TOKEN + 1], [1, 2**40]):
        with pytest.raises(ValueError, match=f"allowed: 0 to {MAX_TOKEN}"):
            tree.append(handle, bad)
    assert tree.tokens(handle).tolist() == []
    tree.append(handle, [0, MAX_TOKEN])
    assert tree.count([0, MAX_TOKEN]) == 1.0


@given(st.data())
@settings(max_examples=30)
def test_a_full_tree_reports_it_and_stays_exact(data: st.DataObject) -> None:
    granted = data.draw(st.integers(0, 12))
    allowances = iter([True] * granted)
    tree = SuffixTree(8, lambda nbytes: next(allowances, False))
    said: dict[int, list[int]] = {}
    with pytest.raises(OutOfMemoryBudget):
        while True:
            handle = tree.start()
            said[handle] = []
            for _ in range(50):
                tokens = data.draw(st.lists(st.integers(0, 200), min_size=8, max_size=8))
                said[handle] = tree.tokens(handle).tolist()
                tree.append(handle, tokens)
            said[handle] = tree.tokens(handle).tolist()
            tree.finish(handle)
    for handle, tokens in said.items():
        assert tree.tokens(handle).tolist()[: len(tokens)] == tokens
    reference = Reference(8, {handle: (tree.tokens(handle).tolist(), 1.0) for handle in said}, {max(said, default=0)})
    for handle in said:
        for i in range(0, len(reference.sequences[handle][0]) - 3, 37):
            string = reference.sequences[handle][0][i : i + 3]
            assert tree.count(string) == reference.count(string)


def test_weights_scale_exactly() -> None:
    tree = SuffixTree(8)
    handles = [tree.start(weight) for weight in (1.0, 0.25)]
    tree.append(handles[0], [1, 2, 3, 1, 2])
    tree.append(handles[1], [1, 2, 4, 1, 2])
    before = tree.propose(handles[1], 4, SpeculationRule())
    tree.scale(2.0**-100)
    assert tree.propose(handles[1], 4, SpeculationRule()) == before
    assert before.tokens[0] == 3
    tree.remove(handles)
    assert tree.num_nodes == 1


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"factor": 0.0}, "factor 0.0"),
        ({"factor": -1.0, "offset": 3.0}, "factor -1.0"),
        ({"min_probability": 1.5}, "min_probability is 1.5"),
    ],
)
def test_invalid_rules_are_refused(rule: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpeculationRule(**rule)

"""Responses that a step left are continued by a later one: every token's version is right, none is too old."""

from __future__ import annotations

import random
from array import array
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_tlt.errors import ConfigError, RunError
from megatron_tlt.rollout.types import Request, Response, SamplingSpec
from megatron_tlt.rollout.vllm_requests import check_requests
from megatron_tlt.trainer import carried as carried_module
from megatron_tlt.trainer.carried import CarriedResponses, Continuations, Key, whole_versions

MOST = 12
"""Tokens of the longest response."""


def response(key: Key, versions: tuple[int, ...], reason: str = "abort") -> Response:
    """A response whose token ids and log-probs are the versions that sampled them, by position."""
    tokens = array("i", [100 * version + at for at, version in enumerate(versions)])
    return Response(
        f"{key[0]}-{key[1]}", (1, 2, key[0] + 3), tokens, array("f", [-v / 8 for v in versions]), reason, 0.0
    )


def test_responses_come_back_as_they_were_left_and_once() -> None:
    held = CarriedResponses(max_staleness=3)
    held.add(
        {(4, 0): response((4, 0), (2, 2, 2)), (4, 1): response((4, 1), (2,), "stop"), (5, 0): response((5, 0), ())}, 2
    )
    held.add({(7, 0): response((7, 0), (3, 3))}, 3)
    assert [row.key for row in held.rows] == [(4, 0), (4, 1), (7, 0)], "what has no tokens is not carried"
    found = held.take([4], [4], 4)
    assert found.keys() == {(4, 0), (4, 1)}
    assert list(found[4, 0].token_ids) == [200, 201, 202] and list(found[4, 0].log_probs) == [-0.25] * 3
    assert found[4, 0].versions == ((2, 3),) and found[4, 0].finish_reason == "abort"
    assert found[4, 1].finish_reason == "stop"
    assert held.take([4], [4], 4) == {} and [row.key for row in held.rows] == [(7, 0)]
    assert held.take([7], [], 4) == {} and not held.rows, "another rank's engine has it"


def test_what_is_too_old_is_dropped() -> None:
    held = CarriedResponses(max_staleness=2)
    held.add({(1, 0): response((1, 0), (5,)), (1, 1): response((1, 1), (5, 5))}, 5)
    held.add({(2, 0): response((2, 0), (6,))}, 6)
    assert held.take([1, 2], [1, 2], 8).keys() == {(2, 0)}


def test_only_what_is_missing_is_asked_for() -> None:
    held = CarriedResponses(max_staleness=9)
    held.add({(0, 0): response((0, 0), (1, 1, 1)), (0, 1): response((0, 1), (1, 1), "stop")}, 1)
    spec = SamplingSpec(temperature=1.0, max_tokens=8, min_tokens=4)
    requests = [Request(f"0-{sample}", (1, 2, 3), spec, 7, "p", sample) for sample in range(3)]
    keys = {request.request_id: (0, sample) for sample, request in enumerate(requests)}
    continuations = Continuations(held.take([0], [0], 2), keys)
    asked, ended = continuations.begin(requests)
    assert [request.request_id for request in asked] == ["0-0", "0-2"]
    assert asked[0].prompt_token_ids == (1, 2, 3, 100, 101, 102)
    assert (asked[0].sampling.max_tokens, asked[0].sampling.min_tokens) == (5, 1)
    check_requests(asked, max_prompt_tokens=3, max_model_len=11, vocab_size=200)
    with pytest.raises(ConfigError, match="its prompt has 3 tokens"):
        check_requests(asked, max_prompt_tokens=2, max_model_len=11, vocab_size=200)
    assert asked[1] == requests[2]
    assert [(one.request_id, list(one.token_ids), one.finish_reason) for one in ended] == [("0-1", [100, 101], "stop")]
    new = Response("0-0", asked[0].prompt_token_ids, array("i", [9, 8]), array("f", [-1.0, -2.0]), "stop", 3.0)
    whole = continuations.join(new)
    assert whole.prompt_token_ids == (1, 2, 3) and list(whole.token_ids) == [100, 101, 102, 9, 8]
    assert list(whole.log_probs) == [-0.125] * 3 + [-1.0, -2.0] and whole_versions(whole, 2) == ((1, 3), (2, 2))
    alone = Response("0-2", (1, 2, 3), array("i", [5]), array("f", [-1.0]), "stop", 1.0)
    assert continuations.join(alone) is alone and whole_versions(alone, 2) == ((2, 1),)


def test_what_answers_another_prompt_is_not_continued() -> None:
    held = CarriedResponses(max_staleness=9)
    held.add({(0, 0): response((0, 0), (1, 1)), (0, 1): response((0, 1), (1, 1), "stop")}, 1)
    spec = SamplingSpec(temperature=1.0, max_tokens=8)
    requests = [Request(f"0-{sample}", (1, 2, 4), spec, 7, "p", sample) for sample in range(2)]
    continuations = Continuations(held.take([0], [0], 2), {"0-0": (0, 0), "0-1": (0, 1)})
    asked, ended = continuations.begin(requests)
    assert asked == requests and not ended, "after a resume with other limits an index may be another problem's"
    alone = Response("0-0", (1, 2, 4), array("i", [5]), array("f", [-1.0]), "stop", 1.0)
    assert continuations.join(alone) is alone


def test_what_has_all_its_tokens_is_not_asked_for() -> None:
    held = CarriedResponses(max_staleness=9)
    held.add({(0, 0): response((0, 0), (1,) * 8)}, 1)
    request = Request("0-0", (1, 2, 3), SamplingSpec(temperature=1.0, max_tokens=8), 7, "p")
    asked, (ended,) = Continuations(held.take([0], [0], 1), {"0-0": (0, 0)}).begin([request])
    assert not asked and ended.finish_reason == "length" and len(ended.token_ids) == 8


class Oracle:
    """A run of rounds that stop at random: it decodes token by token and remembers who sampled what."""

    def __init__(self, rng: random.Random, bound: int, folder: Path) -> None:
        self.rng, self.bound, self.folder = rng, bound, folder
        self.held = CarriedResponses(bound)
        self.known: dict[Key, list[int]] = {}
        self.version, self.trained = 0, 0

    def round(self, problems: range) -> None:
        keys = {f"{problem}-{sample}": (problem, sample) for problem in problems for sample in range(2)}
        spec = SamplingSpec(temperature=1.0, max_tokens=MOST)
        requests = [Request(name, (1, 2, key[0] + 3), spec, 0, "p") for name, key in keys.items()]
        before = self.held.take(problems, problems, self.version)
        expired = {key for key in keys.values() if key in self.known and key not in before}
        for key in expired:
            assert self.version - self.known.pop(key)[0] > self.bound, "only what is too old is dropped"
        continuations = Continuations(before, keys)
        asked, ended = continuations.begin(requests)
        done = {keys[one.request_id]: one for one in ended}
        left: dict[Key, Response] = {}
        for request in asked:
            key = keys[request.request_id]
            count = self.rng.randint(0, request.sampling.max_tokens)
            start = len(self.known.get(key, ()))
            tokens = array("i", [100 * self.version + start + at for at in range(count)])
            reason = self.rng.choice(["abort", "abort", "stop"])
            probs = array("f", [-self.version / 8] * count)
            whole = continuations.join(
                Response(request.request_id, request.prompt_token_ids, tokens, probs, reason, 0.0)
            )
            self.known.setdefault(key, []).extend([self.version] * count)
            if reason == "abort" or not count:
                left[key] = whole
            else:
                done[key] = whole
        for key, one in done.items():
            self.check(key, one)
            del self.known[key]
        for key in [key for key, one in left.items() if not len(one.token_ids)]:
            self.known.pop(key)
        self.held.add(left, self.version)

    def check(self, key: Key, one: Response) -> None:
        versions = [version for version, count in whole_versions(one, self.version) for _ in range(count)]
        assert versions == self.known[key]
        assert list(one.token_ids) == [100 * version + at for at, version in enumerate(versions)]
        assert list(one.log_probs) == [-version / 8 for version in versions]
        assert self.version - versions[0] <= self.bound
        self.trained += 1

    def restart(self) -> None:
        """Saves, and goes on from what was saved."""
        self.held.save(self.folder)
        self.held = CarriedResponses(self.bound)
        self.held.load([self.folder])


@settings(max_examples=100)
@given(seed=st.integers(0, 1 << 32), bound=st.integers(0, 5))
def test_over_random_schedules_no_token_is_too_old_and_every_version_is_right(
    seed: int, bound: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rng = random.Random(seed)
    oracle = Oracle(rng, bound, tmp_path_factory.getbasetemp())
    for _ in range(10):
        first = rng.randint(0, 3)
        oracle.round(range(first, first + rng.randint(1, 3)))
        if rng.random() < 0.15:
            oracle.restart()
        oracle.version += rng.randint(0, 2)


def test_another_number_of_ranks_shares_the_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts: list[Mapping[Key, Response]] = [
        {(0, 0): response((0, 0), (1, 1)), (2, 0): response((2, 0), (1,))},
        {(1, 0): response((1, 0), (1, 1, 1), "stop")},
    ]
    folders = [tmp_path / f"rank_{at}" for at in range(2)]
    for part, folder in zip(parts, folders, strict=True):
        folder.mkdir()
        held = CarriedResponses(5)
        held.add(part, 1)
        held.save(folder)
    whole = CarriedResponses(5)
    whole.load(folders)
    assert whole.take([0, 1, 2], [0, 1, 2], 1).keys() == {(0, 0), (1, 0), (2, 0)}
    monkeypatch.setattr(carried_module, "world_size", lambda: 2)
    monkeypatch.setattr(carried_module, "rank", lambda: 1)
    half = CarriedResponses(5)
    half.load(folders)
    assert [row.key for row in half.rows] == [(0, 0), (1, 0), (2, 0)] and half._batch.held == (1,)
    (folders[0] / "tokens.npz").write_bytes(b"broken")
    monkeypatch.setattr(carried_module, "rank", lambda: 0)
    with pytest.raises(RunError, match="rank_0: carried responses cannot be read"):
        CarriedResponses(5).load(folders)


def test_a_stopped_step_loses_nothing() -> None:
    held = CarriedResponses(5)
    held.add({(0, 0): response((0, 0), (1, 1)), (1, 0): response((1, 0), (1,))}, 1)
    with pytest.raises(KeyboardInterrupt), held.unless_interrupted():
        assert held.take([0], [0], 2)
        held.add({(3, 0): response((3, 0), (2,))}, 2)
        raise KeyboardInterrupt
    assert [row.key for row in held.rows] == [(0, 0), (1, 0)]
    assert held.take([0, 1], [0, 1], 2).keys() == {(0, 0), (1, 0)}

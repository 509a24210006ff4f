"""The suffix-tree drafter (DAS, suffix-tree drafter): drafts continuations of earlier responses to the prompt."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from megatron_tlt.config.speculation import SuffixConfig
from megatron_tlt.speculation.suffix_file import read_responses, write_responses
from megatron_tlt.speculation.suffix_history import EpochWeights, ResponseTree
from megatron_tlt.speculation.suffix_store import PROBLEM_BYTES, RESPONSE_BYTES, ResponseStore, StoredResponse
from megatron_tlt.speculation.suffix_tree import (
    OutOfMemoryBudget,
    SpeculationRule,
    SuffixTree,
    Tokens,
    as_tokens,
    check_tokens,
)
from megatron_tlt.speculation.token_drafter import FinishedResponse, Proposal, TokenIds, no_proposal

_RELEASE_TO = 0.9
"""Share of the bound to which unused trees are dropped at once, because searching for them takes time."""
_STORED = 0.5
"""Share of the bound for recorded responses; trees have the rest."""
_INSERTED = {"problem": 1 / 8, "global": 7 / 8}
"""Share of the remaining room for recorded responses in one tree; other trees and growing requests need the rest."""
_TIGHT = 31 / 32
"""Share of the bound above which requests might find no room of their own."""
_GLOBAL = ""


@lru_cache
def _bounded(rule: SpeculationRule, least_probability: float) -> SpeculationRule:
    """The rule with at least this bound; cached, since it is called per request and step with few distinct bounds."""
    return replace(rule, min_probability=max(rule.min_probability, least_probability))


@dataclass
class _SuffixRequest:
    key: str
    handle: int | None = None  # in the tree of that key
    own: SuffixTree | None = None
    own_handle: int = 0
    own_bytes: int = 0


class SuffixDrafter:
    """A ``TokenDrafter`` with a suffix tree per problem, in bounded memory that survives a restart.

    Responses of past rollouts are in a store that is the same on every engine, whichever engine decoded them. A tree is
    built from it when a request first drafts for its problem. Tokens of the running rollout are only in this engine's
    trees, until ``end_rollout`` records the responses of all engines.

    If memory is short, trees of problems without running requests are dropped first, least recently used first. Then
    the oldest responses in the growing tree are dropped, and finally the request gets no tree. The store has its own
    bound (``ResponseStore``), independent of the trees; otherwise engines would keep different responses.

    Args:
        prompt_tokens: tokens of the prompt's end stored before a response, so that its first tokens can be matched.
    """

    def __init__(self, config: SuffixConfig | None = None, prompt_tokens: int = 16) -> None:
        self.config = config = config or SuffixConfig()
        self._prompt_tokens = prompt_tokens
        self._rule = SpeculationRule(config.factor, config.offset, config.min_probability)
        self._weights = EpochWeights(self.config.epoch_decay)
        self._store = ResponseStore(self.config.window, int(_STORED * self.config.max_bytes))
        self._trees: OrderedDict[str, ResponseTree] = OrderedDict()  # least recently used first
        self._requests: dict[str, _SuffixRequest] = {}
        self._tree_bytes = 0  # of ``_trees`` and of requests' own trees
        self._counters: Counter[str] = Counter()

    def start(self, request_id: str, problem: str, prompt: Sequence[int]) -> None:
        """See ``TokenDrafter.start``."""
        if request_id in self._requests:
            raise ValueError(f"request {request_id!r} has been started already")
        tokens = check_tokens(as_tokens(prompt))
        key = self._key(problem)
        tree = self._tree(key)
        tree.users += 1
        request = self._requests[request_id] = _SuffixRequest(key)
        try:
            tree.update(lambda: self._newest_first(key), self._limit(tree))
            request.handle = tree.start(self._running_epoch(problem))
        except OutOfMemoryBudget:
            self._counters["requests_not_recorded"] += 1
        self._account(tree)
        if self.config.own_tree:
            self._start_own(request)
        if request.handle is not None:
            self._append(request, tokens[max(0, len(tokens) - self._prompt_tokens) :])
        self._append_own(request, tokens)

    def extend(self, request_id: str, tokens: Sequence[int]) -> None:
        """See ``TokenDrafter.extend``."""
        request = self._requests[request_id]
        array = as_tokens(tokens)
        self._append(request, array)  # checks them before anything is added
        self._append_own(request, array)

    def propose(self, request_id: str, max_tokens: int, least_probability: float = 0.0) -> Proposal:
        """See ``TokenDrafter.propose``: uses the problem's tree, or the request's own tree after a longer match.

        DAS takes the higher score. Here the problem's tree contains the request's response too, and the own tree's few
        counts make its score too high. Only the own tree contains the prompt, and a match in the prompt is longer.
        """
        request = self._requests[request_id]
        best, rule = no_proposal(), _bounded(self._rule, least_probability)
        if request.handle is not None:
            tree = self._trees[request.key].tree
            assert tree is not None
            best = tree.propose(request.handle, max_tokens, rule)
        if request.own is not None and best.score < max_tokens:  # otherwise no better draft exists
            own = request.own.propose(request.own_handle, max_tokens, rule)
            if own.score > best.score and own.match_length > best.match_length:
                return own
        return best

    def finish(self, request_id: str) -> None:
        """See ``TokenDrafter.finish``."""
        request = self._requests.pop(request_id)
        tree = self._trees[request.key]
        if request.handle is not None:
            try:
                tree.finish(request.handle)
            except OutOfMemoryBudget:
                tree.discard(request.handle)
                self._counters["requests_not_recorded"] += 1
        tree.users -= 1
        self._account(tree)
        self._drop_own(request)
        self._forget_if_empty(request.key)

    def learn(self, problem: str, prompt: Sequence[int], response: Sequence[int]) -> None:
        """See ``TokenDrafter.learn``; an unused tree is built when a request needs it."""
        tokens = self._sequence(prompt, response)
        key, epoch = self._key(problem), self._running_epoch(problem)
        growing = key in self._trees and self._trees[key].users and self._trees[key].tree is not None
        if not growing and not self._make_room(None, tokens.nbytes + RESPONSE_BYTES + PROBLEM_BYTES):
            self._counters["requests_not_recorded"] += 1
            return
        tree = self._tree(key)
        tree.keep(epoch, tokens)
        if growing:
            tree.update(list, self.config.max_bytes)
        self._account(tree)

    def begin_step(self) -> None:
        """See ``TokenDrafter.begin_step``; no data is kept for a single step only."""

    def end_rollout(self, responses: Iterable[FinishedResponse]) -> None:
        """See ``TokenDrafter.end_rollout``: the responses are one visit of each of their problems.

        Raises:
            ValueError: requests are running, or a token is out of range.
        """
        if self._requests:
            raise ValueError(f"{len(self._requests)} requests decode; a rollout ends when none does")
        visits: dict[str, list[Tokens]] = defaultdict(list)
        for problem, prompt, tokens in responses:
            visits[problem].append(self._sequence(prompt, tokens))
        recorded: dict[str, list[StoredResponse]] = defaultdict(list)
        dropped: list[StoredResponse] = []
        for problem, sequences in visits.items():
            visit = self._store.newest_visit(problem) + 1
            recorded[self._key(problem)] += self._store.record(problem, visit, sequences)
            dropped += self._store.expire(problem)
        evicted, problems = self._store.shrink()
        self._counters["responses_evicted"] += len(evicted)
        self._counters["problems_evicted"] += problems
        gone: dict[str, list[StoredResponse]] = defaultdict(list)
        for response in dropped + evicted:
            gone[self._key(response.problem)].append(response)
        for key, tree in list(self._trees.items()):
            tree.record(recorded[key])
            tree.drop(gone[key])
            if self.config.scope == "global":
                tree.reweigh([old for problem in visits for old in self._older(problem)])
            self._account(tree)
            tight = self.memory_bytes > _TIGHT * self.config.max_bytes
            if tree.nbytes > self._limit(tree) and (tight or tree.mostly_free):
                tree.release()  # its arrays never shrink; a request rebuilds it with smaller ones
                self._account(tree)
            self._forget_if_empty(key)
        self._make_room(None, 0)

    @property
    def memory_bytes(self) -> int:
        """Capacity of the trees, tokens, and an allowance for Python objects; never above ``max_bytes``."""
        return self._tree_bytes + self._store.nbytes

    def counters(self) -> dict[str, int]:
        """Dropped trees, responses without room in trees, dropped stored responses, requests without a tree."""
        names = (
            "trees_released",
            "responses_left_out",
            "responses_evicted",
            "problems_evicted",
            "requests_not_recorded",
        )
        return {name: self._counters[name] for name in (*names, "own_trees_dropped")}

    def save(self, path: Path | str) -> None:
        """Write all recorded responses, without those of the running rollout.

        Raises:
            RunError: the disk is full or the path cannot be written; an older file is kept.
        """
        write_responses(path, self._store)

    def load(self, path: Path | str) -> None:
        """Replace the recorded responses by a file's; trees are built when their problems occur.

        Raises:
            OtherVersion: the file has another release's format; nothing is changed.
            RunError: the file cannot be read or is damaged; nothing is changed.
            ValueError: requests are running.
        """
        if self._requests:
            raise ValueError(f"{len(self._requests)} requests decode; a file can be loaded between rollouts only")
        responses = read_responses(path)
        self._store = ResponseStore(self.config.window, int(_STORED * self.config.max_bytes))
        self._trees.clear()
        self._tree_bytes = 0
        for problem, visit, tokens in responses:
            self._store.record(problem, visit, [tokens])
        for problem in {problem: None for problem, _, _ in responses}:
            self._store.expire(problem)
        self._store.shrink()

    def _key(self, problem: str) -> str:
        return problem if self.config.scope == "problem" else _GLOBAL

    def _tree(self, key: str) -> ResponseTree:
        if key not in self._trees:
            self._trees[key] = ResponseTree(
                self._weights, self.config.max_depth, self._epoch_of, self._allow, self._counters
            )
        self._trees.move_to_end(key)
        return self._trees[key]

    def _epoch_of(self, response: StoredResponse) -> int:
        """The epoch that determines a response's weight.

        In a tree of all problems this is its age in visits of its own problem. The running visit then has the weight of
        the newest one, since a response's weight must not change when it is recorded.
        """
        if self.config.scope == "problem":
            return response.visit
        return response.visit - self._store.newest_visit(response.problem)

    def _running_epoch(self, problem: str) -> int:
        return self._store.newest_visit(problem) + 1 if self.config.scope == "problem" else 0

    def _newest_first(self, key: str) -> list[StoredResponse]:
        stored = self._store.responses(key) if self.config.scope == "problem" else self._store
        return sorted(stored, key=lambda response: -response.order)

    def _older(self, problem: str) -> Iterator[StoredResponse]:
        """A problem's responses of visits before its newest one."""
        newest = self._store.newest_visit(problem)
        return (response for response in self._store.responses(problem) if response.visit < newest)

    def _limit(self, tree: ResponseTree) -> int:
        """Size in bytes up to which recorded responses may be added to a tree."""
        used = sum(other.accounted for other in self._trees.values() if other.users and other is not tree)
        own = sum(request.own_bytes for request in self._requests.values())
        room = self.config.max_bytes - self._store.nbytes - used - own
        return int(_INSERTED[self.config.scope] * room)

    def _sequence(self, prompt: TokenIds, response: TokenIds) -> Tokens:
        """The token sequence stored in a tree for a finished response."""
        end = as_tokens(prompt[max(0, len(prompt) - self._prompt_tokens) :])
        return check_tokens(np.concatenate([end, as_tokens(response)]))

    def _append(self, request: _SuffixRequest, tokens: Tokens) -> None:
        if request.handle is None:
            return
        tree = self._trees[request.key]
        assert tree.tree is not None
        try:
            tree.tree.append(request.handle, tokens)
        except OutOfMemoryBudget:
            tree.discard(request.handle)
            self._account(tree)
            request.handle = None
            self._counters["requests_not_recorded"] += 1

    def _start_own(self, request: _SuffixRequest) -> None:
        own = SuffixTree(self.config.max_depth, lambda nbytes: self._allow_own(request, nbytes))
        try:
            if not self._allow_own(request, own.nbytes):
                raise OutOfMemoryBudget
            request.own_handle = own.start()
            request.own = own
        except OutOfMemoryBudget:
            self._counters["own_trees_dropped"] += 1
        self._account_own(request)

    def _append_own(self, request: _SuffixRequest, tokens: Tokens) -> None:
        if request.own is None:
            return
        try:
            request.own.append(request.own_handle, tokens)
        except OutOfMemoryBudget:
            self._drop_own(request)
            self._counters["own_trees_dropped"] += 1

    def _drop_own(self, request: _SuffixRequest) -> None:
        request.own = None
        self._account_own(request)

    def _account(self, tree: ResponseTree) -> None:
        now = tree.nbytes
        self._tree_bytes += now - tree.accounted
        tree.accounted = now

    def _account_own(self, request: _SuffixRequest) -> None:
        now = request.own.nbytes if request.own is not None else 0
        self._tree_bytes += now - request.own_bytes
        request.own_bytes = now

    def _allow(self, tree: ResponseTree, nbytes: int) -> bool:
        if not self._make_room(tree, nbytes):
            if not tree.inserting:
                tree.shed()
                self._account(tree)
            return False
        tree.accounted += nbytes
        self._tree_bytes += nbytes
        return True

    def _allow_own(self, request: _SuffixRequest, nbytes: int) -> bool:
        if not self._make_room(None, nbytes):
            return False
        request.own_bytes += nbytes
        self._tree_bytes += nbytes
        return True

    def _make_room(self, wanting: ResponseTree | None, nbytes: int) -> bool:
        """Drop unused trees until ``nbytes`` fit; returns whether they do."""
        if self.memory_bytes + nbytes <= self.config.max_bytes:
            return True
        for key, tree in list(self._trees.items()):
            if self.memory_bytes + nbytes <= _RELEASE_TO * self.config.max_bytes:
                break
            if tree.tree is not None and tree is not wanting and not tree.users:
                tree.release()
                self._account(tree)
                self._counters["trees_released"] += 1
                self._forget_if_empty(key)
        return self.memory_bytes + nbytes <= self.config.max_bytes

    def _forget_if_empty(self, key: str) -> None:
        tree = self._trees[key]
        if tree.empty and not tree.users:
            del self._trees[key]
            self._tree_bytes -= tree.accounted

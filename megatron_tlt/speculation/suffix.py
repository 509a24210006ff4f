"""The suffix-tree drafter (DAS, section of that name): drafts how earlier responses to the same prompt went on."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_tlt.speculation.suffix_file import StoredResponse, read_responses, write_responses
from megatron_tlt.speculation.suffix_history import MIN_WEIGHT, EpochWeights, ProblemHistory
from megatron_tlt.speculation.suffix_tree import (
    OutOfMemoryBudget,
    SpeculationRule,
    SuffixTree,
    Tokens,
    as_tokens,
    check_tokens,
)
from megatron_tlt.speculation.token_drafter import Proposal, no_proposal

SCOPES = ("problem", "global")
MIN_BYTES = 1 << 20
_COOL_TO = 0.9
"""Share of the bound down to which trees are given up at once: they come back, and looking for them takes time."""
_GLOBAL = ""


@dataclass(frozen=True)
class SuffixConfig:
    """How responses are kept and drafted from.

    scope: a tree per problem, or one for all of them.
    max_depth: tokens of match and draft together.
    window: past epochs that count besides the running one; epoch_decay: what an epoch weighs of the one after it.
    prompt_tokens: how much of the prompt's end stands before a response, so that its first tokens can be matched.
    own_tree: whether a request also has a tree of its own prompt and response (DAS compares the two).
    max_bytes: bound on trees and tokens of all problems and requests, in bytes.
    """

    scope: str = "problem"
    max_depth: int = 32
    window: int = 16
    epoch_decay: float = 0.8
    prompt_tokens: int = 16
    own_tree: bool = True
    max_bytes: int = 1 << 30
    rule: SpeculationRule = field(default_factory=SpeculationRule)

    def __post_init__(self) -> None:
        """Raises ValueError for what is out of range."""
        if self.scope not in SCOPES:
            raise ValueError(f"scope {self.scope!r}; allowed: {', '.join(SCOPES)}")
        for name, least in (("window", 0), ("prompt_tokens", 0), ("max_bytes", MIN_BYTES)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed: {least} and more")
        if not (0.0 < self.epoch_decay <= 1.0 and self.epoch_decay**self.window >= MIN_WEIGHT):
            raise ValueError(
                f"epoch_decay {self.epoch_decay}, window {self.window}; allowed: a decay above 0, at most 1, "
                f"with which the window's oldest epoch weighs at least 1/{1 / MIN_WEIGHT:.0f}"
            )


@dataclass
class _Request:
    problem: str
    handle: int | None = None  # in the problem's tree
    own: SuffixTree | None = None
    own_handle: int = 0
    own_bytes: int = 0


class SuffixDrafter:
    """A ``TokenDrafter`` with a suffix tree per problem, in bounded memory that survives a restart.

    Where memory is short, trees of problems that nobody decodes are given up first, the least recently used before
    others (their tokens stay, and the tree comes back with the problem); then the oldest epochs of such problems, then
    the problems; then the oldest responses of the tree that wants to grow; at last a request goes without.
    """

    def __init__(self, config: SuffixConfig | None = None) -> None:
        self.config = config or SuffixConfig()
        self.epoch = 0
        self._weights = EpochWeights(self.config.epoch_decay)
        self._problems: OrderedDict[str, ProblemHistory] = OrderedDict()  # the least recently used first
        self._requests: dict[str, _Request] = {}
        self._bytes = 0
        self._counters: Counter[str] = Counter()

    def start(self, request_id: str, problem: str, prompt: Sequence[int]) -> None:
        """As ``TokenDrafter.start``."""
        if request_id in self._requests:
            raise ValueError(f"request {request_id!r} has been started already")
        tokens = check_tokens(as_tokens(prompt))
        key = problem if self.config.scope == "problem" else _GLOBAL
        history = self._history(key)
        history.users += 1
        request = self._requests[request_id] = _Request(key)
        try:
            request.handle = history.start(self.epoch)
        except OutOfMemoryBudget:
            self._counters["requests_not_recorded"] += 1
        self._account(history)
        if self.config.own_tree:
            self._start_own(request)
        if request.handle is not None and self.config.prompt_tokens:
            self._append(request, tokens[-self.config.prompt_tokens :])
        self._append_own(request, tokens)

    def extend(self, request_id: str, tokens: Sequence[int]) -> None:
        """As ``TokenDrafter.extend``."""
        request = self._requests[request_id]
        array = as_tokens(tokens)
        self._append(request, array)  # checks them before anything is added
        self._append_own(request, array)

    def propose(self, request_id: str, max_tokens: int) -> Proposal:
        """As ``TokenDrafter.propose``: of the problem's tree, or of the request's own after a longer match.

        DAS takes whichever scores higher. Here the problem's tree holds the request's response too, and the few counts
        of the own tree make it too sure of itself; what only it knows is the prompt, and there its match is longer.
        """
        request = self._requests[request_id]
        best = no_proposal()
        if request.handle is not None:
            tree = self._problems[request.problem].tree
            assert tree is not None
            best = tree.propose(request.handle, max_tokens, self.config.rule)
        if request.own is not None and best.score < max_tokens:  # else there is none better
            own = request.own.propose(request.own_handle, max_tokens, self.config.rule)
            if own.score > best.score and own.match_length > best.match_length:
                return own
        return best

    def finish(self, request_id: str) -> None:
        """As ``TokenDrafter.finish``."""
        request = self._requests.pop(request_id)
        history = self._problems[request.problem]
        if request.handle is not None:
            try:
                history.finish(request.handle)
            except OutOfMemoryBudget:
                history.discard(request.handle)
                self._counters["requests_not_recorded"] += 1
        history.users -= 1
        self._account(history)
        self._drop_own(request)
        self._forget_if_empty(request.problem)

    def end_epoch(self) -> None:
        """As ``TokenDrafter.end_epoch``; what decodes now stays one of its epoch."""
        self.epoch += 1
        for key, history in list(self._problems.items()):
            history.drop_before(self.epoch - self.config.window)
            self._account(history)
            self._forget_if_empty(key)

    @property
    def memory_bytes(self) -> int:
        """Trees by capacity, tokens, an allowance for Python's own; never above ``max_bytes``."""
        return self._bytes

    def counters(self) -> dict[str, int]:
        """Trees given up, epochs, problems and responses evicted, requests that went without a tree."""
        names = ("trees_cooled", "epochs_evicted", "problems_evicted", "responses_evicted", "requests_not_recorded")
        return {name: self._counters[name] for name in (*names, "own_trees_dropped")}

    def save(self, path: Path | str) -> None:
        """Writes all responses that have ended; what decodes now is not in it.

        Raises:
            RunError: the disk is full or the path cannot be written; an older file stays.
        """
        responses = (
            StoredResponse(problem, epoch, tokens)
            for problem, history in self._problems.items()
            for epoch, tokens in history.sequences()
        )
        write_responses(path, self.epoch, responses)

    def load(self, path: Path | str) -> None:
        """Takes a file's responses instead of its own; trees are built when their problems come.

        Raises:
            RunError: the file cannot be read or is damaged; nothing has changed.
            ValueError: requests decode.
        """
        if self._requests:
            raise ValueError(f"{len(self._requests)} requests decode; a file can be loaded between rollouts only")
        epoch, responses = read_responses(path)
        self.epoch, self._bytes = epoch, 0
        self._problems.clear()
        for response in responses:
            if response.epoch >= epoch - self.config.window:
                key = response.problem if self.config.scope == "problem" else _GLOBAL
                self._history(key).add(response.epoch, response.tokens)
        for history in self._problems.values():
            self._account(history)
        self._make_room(None, 0)

    def _history(self, key: str) -> ProblemHistory:
        if key not in self._problems:
            self._problems[key] = ProblemHistory(self._weights, self.config.max_depth, self._allow)
        self._problems.move_to_end(key)
        return self._problems[key]

    def _append(self, request: _Request, tokens: Tokens) -> None:
        if request.handle is None:
            return
        history = self._problems[request.problem]
        assert history.tree is not None
        try:
            history.tree.append(request.handle, tokens)
        except OutOfMemoryBudget:
            history.discard(request.handle)
            self._account(history)
            request.handle = None
            self._counters["requests_not_recorded"] += 1

    def _start_own(self, request: _Request) -> None:
        own = SuffixTree(self.config.max_depth, lambda nbytes: self._allow_own(request, nbytes))
        try:
            if not self._allow_own(request, own.nbytes):
                raise OutOfMemoryBudget
            request.own_handle = own.start()
            request.own = own
        except OutOfMemoryBudget:
            self._counters["own_trees_dropped"] += 1
        self._account_own(request)

    def _append_own(self, request: _Request, tokens: Tokens) -> None:
        if request.own is None:
            return
        try:
            request.own.append(request.own_handle, tokens)
        except OutOfMemoryBudget:
            self._drop_own(request)
            self._counters["own_trees_dropped"] += 1

    def _drop_own(self, request: _Request) -> None:
        request.own = None
        self._account_own(request)

    def _account(self, history: ProblemHistory) -> None:
        now = history.nbytes
        self._bytes += now - history.accounted
        history.accounted = now

    def _account_own(self, request: _Request) -> None:
        now = request.own.nbytes if request.own is not None else 0
        self._bytes += now - request.own_bytes
        request.own_bytes = now

    def _allow(self, history: ProblemHistory, nbytes: int) -> bool:
        if not self._make_room(history, nbytes):
            self._counters["responses_evicted"] += history.shed()
            self._account(history)
            return False
        history.accounted += nbytes
        self._bytes += nbytes
        return True

    def _allow_own(self, request: _Request, nbytes: int) -> bool:
        if not self._make_room(None, nbytes):
            return False
        request.own_bytes += nbytes
        self._bytes += nbytes
        return True

    def _make_room(self, wanting: ProblemHistory | None, nbytes: int) -> bool:
        """Evicts what nobody decodes until so many bytes fit, and says whether they do."""
        if self._bytes + nbytes <= self.config.max_bytes:
            return True
        idle = [key for key, history in self._problems.items() if history is not wanting and not history.users]
        for key in idle:
            if self._problems[key].tree is not None and self._bytes + nbytes > _COOL_TO * self.config.max_bytes:
                self._problems[key].cool()
                self._account(self._problems[key])
                self._counters["trees_cooled"] += 1
        while self._bytes + nbytes > self.config.max_bytes and self._evict_epoch(idle):
            pass
        for key in idle:
            if self._bytes + nbytes > self.config.max_bytes:
                self._forget(key)
                self._counters["problems_evicted"] += 1
        return self._bytes + nbytes <= self.config.max_bytes

    def _evict_epoch(self, keys: list[str]) -> bool:
        """Drops the oldest epoch of these problems, the running one excepted."""
        epochs = [self._problems[key].oldest_epoch for key in keys]
        oldest = min((epoch for epoch in epochs if epoch is not None), default=self.epoch)
        if oldest >= self.epoch:
            return False
        for key in keys:
            self._problems[key].drop_before(oldest + 1)
            self._account(self._problems[key])
        self._counters["epochs_evicted"] += 1
        return True

    def _forget(self, key: str) -> None:
        history = self._problems.pop(key)
        self._bytes -= history.accounted

    def _forget_if_empty(self, key: str) -> None:
        if self._problems[key].empty and not self._problems[key].users:
            self._forget(key)

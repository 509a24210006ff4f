"""Classes of response lengths, learned from history and revised while decoding (DAS, length-aware budget)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any

# quantiles that separate the classes [reconstruction]: half of all responses are short, a fifth is the tail
QUANTILES = (0.5, 0.8)


class LengthClass(IntEnum):
    """Length of a response relative to all responses."""

    SHORT = 0
    MEDIUM = 1
    LONG = 2


class LengthWindow:
    """The last ``size`` lengths, in order of arrival and sorted."""

    def __init__(self, size: int, lengths: Iterable[int] = ()) -> None:
        self._arrived: deque[int] = deque(maxlen=size)
        self._sorted: list[int] = []
        for length in lengths:
            self.add(length)

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, length: int) -> None:
        if len(self._arrived) == self._arrived.maxlen:
            del self._sorted[bisect_left(self._sorted, self._arrived[0])]
        self._arrived.append(length)
        insort(self._sorted, length)

    def quantile(self, share: float) -> int:
        """The smallest length that at least ``share`` of the window does not exceed; the window must not be empty."""
        return self._sorted[min(len(self._sorted) - 1, max(0, round(share * len(self._sorted)) - 1))]

    def count(self, above: int, up_to: float) -> int:
        """Number of lengths in (``above``, ``up_to``]."""
        return max(0, bisect_right(self._sorted, up_to) - bisect_right(self._sorted, above))

    def median_above(self, above: int) -> int | None:
        """The (lower) median of the lengths greater than ``above``; None if there are none."""
        start = bisect_right(self._sorted, above)
        return self._sorted[(start + len(self._sorted) - 1) // 2] if start < len(self._sorted) else None

    def to_list(self) -> list[int]:
        """The lengths in order of arrival."""
        return list(self._arrived)


class LengthHistory:
    """Response lengths by problem, over all problems, and by the class assigned at the start of a response.

    Bounded: ``per_problem`` lengths for each of ``num_problems`` problems (least recently finished problems are dropped
    first), ``window`` lengths over all and for each initial class.
    """

    def __init__(self, num_problems: int = 4096, per_problem: int = 16, window: int = 4096) -> None:
        """Start with an empty history.

        Raises:
            ValueError: a bound is below 1.
        """
        for name, bound in (("num_problems", num_problems), ("per_problem", per_problem), ("window", window)):
            if bound < 1:
                raise ValueError(f"{name} is {bound}; allowed: 1 and more")
        self._bounds = (num_problems, per_problem, window)
        self._problems: OrderedDict[str, LengthWindow] = OrderedDict()
        self._all = LengthWindow(window)
        self._by_initial = {initial: LengthWindow(window) for initial in LengthClass}

    def add(self, problem: str, length: int, initial: LengthClass | None = None) -> None:
        """Record a finished response of ``length`` tokens; ``initial`` is its class at the start, if any."""
        num_problems, per_problem, _ = self._bounds
        lengths = self._problems.setdefault(problem, LengthWindow(per_problem))
        lengths.add(length)
        self._problems.move_to_end(problem)
        while len(self._problems) > num_problems:
            self._problems.popitem(last=False)
        self._all.add(length)
        if initial is not None:
            self._by_initial[initial].add(length)

    @property
    def thresholds(self) -> tuple[int, int] | None:
        """The maximum length of short and of medium responses; None before any response."""
        if not self._all:
            return None
        return self._all.quantile(QUANTILES[0]), self._all.quantile(QUANTILES[1])

    def class_of(self, length: int) -> LengthClass:
        """The class of a finished response's length; medium before any response."""
        if (thresholds := self.thresholds) is None:
            return LengthClass.MEDIUM
        return LengthClass(sum(length > threshold for threshold in thresholds))

    def initial_class(self, problem: str) -> LengthClass:
        """The class of the median of the problem's lengths; without any, the most frequent class over all problems."""
        if known := self._problems.get(problem):
            return self.class_of(known.quantile(0.5))
        if self.thresholds is None:
            return LengthClass.MEDIUM
        return self._most_likely(self._counts(self._all, 0))

    def current_class(self, initial: LengthClass, num_tokens: int) -> LengthClass:
        """argmax P(class | more than ``num_tokens`` tokens, initial class); of equal ones the longest.

        Counted over finished responses with this initial class and more tokens; the distribution over all responses
        counts as one further response. If no response has more tokens, the class is long.
        """
        if self.thresholds is None:
            return LengthClass.MEDIUM
        overall = self._counts(self._all, num_tokens)
        total = sum(overall)
        if not total:
            return LengthClass.LONG
        own = self._counts(self._by_initial[initial], num_tokens)
        return self._most_likely([count + share / total for count, share in zip(own, overall, strict=True)])

    def expected_length(self, problem: str, initial: LengthClass, num_tokens: int) -> int | None:
        """The median of lengths above ``num_tokens``: the problem's own, else its initial class's, else all.

        None if no response was longer.
        """
        windows = (self._problems.get(problem), self._by_initial[initial], self._all)
        medians = (window.median_above(num_tokens) for window in windows if window is not None)
        return next((median for median in medians if median is not None), None)

    def _counts(self, window: LengthWindow, above: int) -> list[int]:
        """Number of the window's lengths above ``above``, per class."""
        assert self.thresholds is not None
        short, medium = self.thresholds
        edges = [(above, short), (max(above, short), medium), (max(above, medium), float("inf"))]
        return [window.count(low, high) for low, high in edges]

    @staticmethod
    def _most_likely(weights: Sequence[float]) -> LengthClass:
        return max(LengthClass, key=lambda length_class: (weights[length_class], length_class))

    def state(self) -> dict[str, Any]:
        """The full history as JSON."""
        return {
            "problems": [[problem, lengths.to_list()] for problem, lengths in self._problems.items()],
            "all": self._all.to_list(),
            "by_initial": [window.to_list() for window in self._by_initial.values()],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the result of ``state()``; entries beyond this history's bounds are dropped, oldest first.

        Raises:
            ValueError: the state is malformed.
        """
        num_problems, per_problem, window = self._bounds
        try:
            problems = [(str(problem), _lengths(lengths)) for problem, lengths in state["problems"]]
            overall, by_initial = _lengths(state["all"]), [_lengths(lengths) for lengths in state["by_initial"]]
            classes = list(zip(LengthClass, by_initial, strict=True))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a state of a length history: {error!r}") from error
        self._problems = OrderedDict(
            (problem, LengthWindow(per_problem, lengths)) for problem, lengths in problems[-num_problems:]
        )
        self._all = LengthWindow(window, overall)
        self._by_initial = {initial: LengthWindow(window, lengths) for initial, lengths in classes}


def _lengths(values: Iterable[Any]) -> list[int]:
    lengths = list(values)
    if not all(isinstance(value, int) and value >= 0 for value in lengths):
        raise ValueError("a length that is not a whole number of tokens")
    return lengths

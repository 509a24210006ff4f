"""Classes of response lengths, learnt from history and revised while decoding (DAS, length-aware budget)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any

# quantiles of all lengths that part the classes [reconstruction]: half of all responses are short, a fifth is the tail
QUANTILES = (0.5, 0.8)


class LengthClass(IntEnum):
    """How long a response is among all."""

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
        """How many are in (``above``, ``up_to``]."""
        return max(0, bisect_right(self._sorted, up_to) - bisect_right(self._sorted, above))

    def median_above(self, above: int) -> int | None:
        """The (lower) median of those above; None where none is."""
        start = bisect_right(self._sorted, above)
        return self._sorted[(start + len(self._sorted) - 1) // 2] if start < len(self._sorted) else None

    def to_list(self) -> list[int]:
        """In order of arrival."""
        return list(self._arrived)


class LengthHistory:
    """Response lengths by problem, over all problems, and by the class that a response was given at its start.

    Bounded: ``per_problem`` lengths for each of ``num_problems`` problems (the one that finished longest ago goes
    first), ``window`` lengths over all and for each initial class.
    """

    def __init__(self, num_problems: int = 4096, per_problem: int = 16, window: int = 4096) -> None:
        """Empty.

        Raises:
            ValueError: a bound below 1.
        """
        for name, bound in (("num_problems", num_problems), ("per_problem", per_problem), ("window", window)):
            if bound < 1:
                raise ValueError(f"{name} is {bound}; allowed: 1 and more")
        self._bounds = (num_problems, per_problem, window)
        self._problems: OrderedDict[str, LengthWindow] = OrderedDict()
        self._all = LengthWindow(window)
        self._by_initial = {initial: LengthWindow(window) for initial in LengthClass}

    def add(self, problem: str, length: int, initial: LengthClass | None = None) -> None:
        """A response of ``length`` tokens is finished; ``initial`` is the class that it was given, if any."""
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
        """The longest length that is short, and the longest that is medium; None before any response."""
        if not self._all:
            return None
        return self._all.quantile(QUANTILES[0]), self._all.quantile(QUANTILES[1])

    def class_of(self, length: int) -> LengthClass:
        """The class of a finished response's length; medium before any response."""
        if (thresholds := self.thresholds) is None:
            return LengthClass.MEDIUM
        return LengthClass(sum(length > threshold for threshold in thresholds))

    def initial_class(self, problem: str) -> LengthClass:
        """From the median of the problem's own lengths; without any, the most frequent class over all problems."""
        if known := self._problems.get(problem):
            return self.class_of(known.quantile(0.5))
        if self.thresholds is None:
            return LengthClass.MEDIUM
        return self._most_likely(self._counts(self._all, 0))

    def current_class(self, initial: LengthClass, num_tokens: int) -> LengthClass:
        """argmax P(class | more than ``num_tokens`` tokens, initial class); of equal ones the longest.

        Counted over finished responses that were given this class and grew longer than that, with the distribution
        over all as one further response; where none grew longer, the response is the longest: long.
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

        None where no response was longer.
        """
        windows = (self._problems.get(problem), self._by_initial[initial], self._all)
        medians = (window.median_above(num_tokens) for window in windows if window is not None)
        return next((median for median in medians if median is not None), None)

    def _counts(self, window: LengthWindow, above: int) -> list[int]:
        """Of each class, how many of the window are longer than ``above``."""
        assert self.thresholds is not None
        short, medium = self.thresholds
        edges = [(above, short), (max(above, short), medium), (max(above, medium), float("inf"))]
        return [window.count(low, high) for low, high in edges]

    @staticmethod
    def _most_likely(weights: Sequence[float]) -> LengthClass:
        return max(LengthClass, key=lambda length_class: (weights[length_class], length_class))

    def state(self) -> dict[str, Any]:
        """All of it, as JSON."""
        return {
            "problems": [[problem, lengths.to_list()] for problem, lengths in self._problems.items()],
            "all": self._all.to_list(),
            "by_initial": [window.to_list() for window in self._by_initial.values()],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state()``'s result; what is beyond this one's bounds is dropped, oldest first.

        Raises:
            ValueError: it is not one.
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

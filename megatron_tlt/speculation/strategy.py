"""Speculation strategies, and the record of an engine step under a strategy."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from megatron_tlt.config.drafter_kinds import KINDS, MODEL_FREE, PATH_PATTERN, model_drafters

DRAFTERS = ("off", *MODEL_FREE, *KINDS, *(f"suffix+{kind}" for kind in KINDS))
"""Drafters of this package.

A pair drafts with the suffix tree for requests with a likely match, and with the head for the others.
"""
NAME = (
    rf"(?P<drafter>[a-z0-9+]+|(suffix\+)?{PATH_PATTERN})-"
    r"(?P<tokens>[1-9]\d*)(?P<by_length>-by-length)?(-p(?P<percent>[1-9]\d?))?"
)


def drafters() -> tuple[str, ...]:
    """Drafters that a strategy may use in this process: ``DRAFTERS``, then users' kinds and their pairs."""
    others = model_drafters()[len(KINDS) :]
    return (*DRAFTERS, *others, *(f"suffix+{kind}" for kind in others))


def drafters_of(source: str) -> tuple[str, ...]:
    """The drafters of a strategy's ``source``, in the order in which they are tried; none for "off"."""
    return () if source == "off" else tuple(source.partition("-")[0].split("+"))


@dataclass(frozen=True, order=True)
class Strategy:
    """One way to speculate: up to ``num_tokens`` draft tokens of ``drafter`` per request and step (0 with "off").

    ``by_length`` gives requests fewer draft tokens, down to none, by their expected length (DAS, length-aware budget).
    ``least_percent`` ends a request's drafts before the first token whose probability of being accepted, with all
    tokens before it, is lower by the drafter's own estimate; so a step verifies few useless drafts.
    """

    drafter: str = "off"
    num_tokens: int = 0
    by_length: bool = False
    least_percent: int = 0

    def __post_init__(self) -> None:
        """Validate the combination of fields.

        Raises:
            ValueError: the drafter is unknown, or the other fields do not fit it.
        """
        if self.drafter not in DRAFTERS and self.drafter not in drafters():
            raise ValueError(f"drafter {self.drafter!r}: allowed are {', '.join(drafters())}")
        if self.drafter == "off" and (self.num_tokens or self.by_length or self.least_percent):
            raise ValueError(
                f"drafter off: num_tokens is {self.num_tokens}, by_length {self.by_length}, least_percent "
                f"{self.least_percent}; allowed: 0, false, 0"
            )
        if self.drafter != "off" and self.num_tokens < 1:
            raise ValueError(f"drafter {self.drafter}: num_tokens is {self.num_tokens}; allowed: 1 and more")
        if not 0 <= self.least_percent < 100 or (self.least_percent and self.drafter == "ngram"):
            raise ValueError(
                f"drafter {self.drafter}: least_percent is {self.least_percent}; allowed: 0 to 99, and 0 for ngram, "
                "which knows no probabilities"
            )

    @cached_property
    def drafters(self) -> tuple[str, ...]:
        """The drafters it uses: ``drafters_of`` its source."""
        return drafters_of(self.drafter)

    @cached_property
    def source(self) -> str:
        """The origin of its drafts, without their number: strategies of one source share acceptance rates."""
        return self.drafter + (f"-p{self.least_percent}" if self.least_percent else "")

    @property
    def least_probability(self) -> float:
        """``least_percent`` as a probability."""
        return self.least_percent / 100

    def uses(self, drafters: Collection[str]) -> bool:
        """Whether it uses any of these drafters."""
        return any(drafter in drafters for drafter in self.drafters)

    @property
    def verify_tokens(self) -> int:
        """Maximum tokens that the target computes per request and step: the drafts and the token before them."""
        return self.num_tokens + 1

    @property
    def name(self) -> str:
        """The name in metrics and plots: "off", "ngram-3", "eagle-5-by-length", "suffix+eagle3-5-p50"."""
        if self.drafter == "off":
            return "off"
        chance = f"-p{self.least_percent}" if self.least_percent else ""
        return f"{self.drafter}-{self.num_tokens}" + ("-by-length" if self.by_length else "") + chance

    @classmethod
    def parse(cls, name: str) -> Strategy:
        """The strategy with this ``name``.

        Raises:
            ValueError: no strategy has this name.
        """
        if name == "off":
            return cls()
        found = re.fullmatch(NAME, name)
        if found is None:
            raise ValueError(
                f"strategy {name!r}: allowed are forms like off, ngram-3, eagle-5-by-length and suffix+eagle3-5-p50"
            )
        drafter, tokens, by_length, percent = found.group("drafter", "tokens", "by_length", "percent")
        return cls(drafter, int(tokens), bool(by_length), int(percent or 0))


OFF = Strategy()


@dataclass(frozen=True)
class BudgetMix:
    """Draft budgets of ``requests`` requests: ``at_least[j]`` of them may have ``j + 1`` drafts or more."""

    requests: int
    at_least: tuple[int, ...]

    @classmethod
    def of(cls, budgets: Iterable[int]) -> BudgetMix:
        """Build the mix from one budget per request."""
        counts = Counter(budgets)
        falling = accumulate(counts[budget] for budget in range(max(counts, default=0), 0, -1))
        return cls(counts.total(), tuple(falling)[::-1])

    @property
    def mean(self) -> float:
        """Mean draft budget per request."""
        return sum(self.at_least) / self.requests if self.requests else 0.0

    def drafted_only(self) -> BudgetMix:
        """The mix without requests that may have no drafts."""
        return BudgetMix(self.at_least[0] if self.at_least else 0, self.at_least)


BudgetsOf = Callable[[Strategy], BudgetMix | None]
"""Draft budgets of the running requests under a strategy; None: all requests may have all of its drafts."""


@dataclass(frozen=True)
class StepRecord:
    """One engine step: its requests, tokens and duration.

    The drafts it verified were made under ``strategy``, at the end of an earlier step. At its own end drafts were made
    under ``next_strategy`` (None: the same one).

    Attributes:
        batch: number of its requests.
        duration: seconds; ``start`` is in seconds since the start of the rollout.
        num_tokens: tokens generated for all its requests. ``num_tokens / duration`` is BEG-MAB's reward (TLT, adaptive
            rollout engine).
        accepted_per_position: ``[j]`` counts the requests whose draft token ``j + 1`` was accepted.
        budgets: the requests' draft budgets, used up or not; None: each may have ``strategy.num_tokens``.
        had_prefill: the step computed prompt tokens.
        num_drafts: number of requests with drafts.
        catch_up_s: seconds spent on tokens that the head had skipped under other strategies.
        drafting_s: seconds spent on drafting, ``catch_up_s`` included; on a GPU only the launch time.
    """

    strategy: Strategy
    batch: int
    duration: float
    num_tokens: int
    num_draft_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()
    budgets: BudgetMix | None = None
    next_strategy: Strategy | None = None
    had_prefill: bool = False
    num_drafts: int = 0
    start: float = 0.0
    catch_up_s: float = 0.0
    drafting_s: float = 0.0

    @property
    def is_steady(self) -> bool:
        """Whether one strategy alone determines its duration and tokens; only such steps are learned from."""
        kept = self.next_strategy in (None, self.strategy)
        return kept and not self.had_prefill and self.duration > 0 and self.num_tokens > 0

    @property
    def num_accepted_tokens(self) -> int:
        """Number of accepted draft tokens."""
        return sum(self.accepted_per_position)

    @property
    def mean_budget(self) -> float:
        """Mean draft budget of the step's requests."""
        return float(self.strategy.num_tokens) if self.budgets is None else self.budgets.mean

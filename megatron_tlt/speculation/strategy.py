"""What an engine may do to draft, as data, and what a step that did so showed."""

from __future__ import annotations

from dataclasses import dataclass

DRAFTERS = ("off", "ngram", "suffix", "eagle", "eagle3")
MODEL_FREE = ("ngram", "suffix")


@dataclass(frozen=True, order=True)
class Strategy:
    """One way to speculate: ``num_tokens`` drafts of ``drafter`` per request and step (0 with "off").

    ``by_length`` lets each request have fewer, down to none, by its expected length (DAS, length-aware budget).
    """

    drafter: str = "off"
    num_tokens: int = 0
    by_length: bool = False

    def __post_init__(self) -> None:
        """Refuse what no engine can do.

        Raises:
            ValueError: an unknown drafter, or a number of tokens that does not fit it.
        """
        if self.drafter not in DRAFTERS:
            raise ValueError(f"drafter {self.drafter!r}: allowed are {', '.join(DRAFTERS)}")
        if self.drafter == "off" and (self.num_tokens or self.by_length):
            raise ValueError(
                f"drafter off: num_tokens is {self.num_tokens}, by_length {self.by_length}; allowed: 0, false"
            )
        if self.drafter != "off" and self.num_tokens < 1:
            raise ValueError(f"drafter {self.drafter}: num_tokens is {self.num_tokens}; allowed: 1 and more")

    @property
    def verify_tokens(self) -> int:
        """Tokens that the target computes per request and step at most: the drafts and the one before them."""
        return self.num_tokens + 1

    @property
    def name(self) -> str:
        """As in metrics and plots: "off", "ngram-3", "eagle-5-by-length"."""
        if self.drafter == "off":
            return "off"
        return f"{self.drafter}-{self.num_tokens}" + ("-by-length" if self.by_length else "")

    @classmethod
    def parse(cls, name: str) -> Strategy:
        """The strategy of a ``name``.

        Raises:
            ValueError: no strategy has this name.
        """
        drafter, *rest = name.split("-", 2)
        by_length = rest[1:] == ["by-length"]
        if not rest:
            return cls(drafter)
        if not rest[0].isdigit() or (rest[1:] and not by_length):
            raise ValueError(f"strategy {name!r}: allowed are forms like off, ngram-3 and eagle-5-by-length")
        return cls(drafter, int(rest[0]), by_length)


OFF = Strategy()


@dataclass(frozen=True)
class StepObservation:
    """An engine step that decoded only (no prompt in it), its drafts made and verified under one strategy.

    ``batch`` counts its requests, ``num_tokens`` what they gained together (at least ``batch``), ``duration`` is in
    seconds. ``tokens / duration`` is the reward r of BEG-MAB (TLT, adaptive rollout engine). ``num_offered_tokens``:
    drafts that a strategy by length let its requests have, found or not.
    """

    strategy: Strategy
    batch: int
    duration: float
    num_tokens: int
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_offered_tokens: int = 0

"""What a round of drafts brings, and how well the drafter is aligned with a policy that moves."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

from megatron_tlt.planning.simulation.constants import Constants

_MODEL_FREE = ("ngram", "suffix")


@dataclass(frozen=True)
class DraftShape:
    """``depth`` levels of at most ``top_k`` candidates each, of which ``verify`` tokens (the one before them included)
    go to the target. A chain of K, as the engines here draft, is (K, 1, K + 1); (0, 1, 1) is no speculation.
    """

    depth: int = 0
    top_k: int = 1
    verify: int = 1
    drafter: str = "eagle"

    @property
    def name(self) -> str:
        """off, eagle-3, or eagle-8_4_48 of a tree, as fastrl writes it."""
        if not self.depth:
            return "off"
        if self.verify == self.depth + 1:
            return f"{self.drafter}-{self.depth}"
        return f"{self.drafter}-{self.depth}_{self.top_k}_{self.verify}"

    @property
    def model_free(self) -> bool:
        return self.drafter in _MODEL_FREE


OFF = DraftShape()


def chain(depth: int, drafter: str = "eagle") -> DraftShape:
    """``depth`` drafts one behind another."""
    return DraftShape(depth, 1, depth + 1, drafter)


def tokens_per_round(draft: DraftShape, acceptance: float, exponent: float) -> float:
    """Tokens that a request gains in a round, the target's own included.

    ``acceptance`` is the chance that a level with one candidate holds the target's token where the level before did.
    With w candidates misses are w ** -exponent as likely.
    """
    if not draft.depth:
        return 1.0
    width = max(1.0, (draft.verify - 1) / draft.depth)
    hit = 1.0 - (1.0 - acceptance) * width**-exponent
    return 1.0 + sum(hit**level for level in range(1, draft.depth + 1))


@dataclass
class Alignment:
    """How far a drafter has come from cold (0) to aligned (1); training raises it, updates of the policy lower it."""

    constants: Constants
    level: float = 0.0

    def trained(self, steps: float) -> None:
        """So many optimizer steps on the policy's newest responses."""
        self.level = 1.0 - (1.0 - self.level) * exp(-steps / self.constants.drafter_steps_to_align)

    def updated(self) -> None:
        """The policy has moved by one update."""
        self.level *= exp(-1.0 / self.constants.updates_to_drift)

    def acceptance(self, draft: DraftShape) -> float:
        """Of one candidate."""
        if draft.model_free:
            return self.constants.model_free_acceptance
        cold, aligned = self.constants.cold_acceptance, self.constants.aligned_acceptance
        return cold + (aligned - cold) * self.level

    def tokens(self, draft: DraftShape) -> float:
        """Per round; see ``tokens_per_round``."""
        return tokens_per_round(draft, self.acceptance(draft), self.constants.candidates_exponent)

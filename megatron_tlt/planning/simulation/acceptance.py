"""Tokens gained per round of drafts, and the drafter's alignment with a policy that changes."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

from megatron_tlt.config.drafter_kinds import MODEL_FREE
from megatron_tlt.planning.simulation.constants import Constants


@dataclass(frozen=True)
class DraftShape:
    """``depth`` levels of at most ``top_k`` candidates each; the target verifies ``verify`` tokens with the one before.

    A chain of K drafts, as the engines here use, is (K, 1, K + 1); (0, 1, 1) is no speculation.
    """

    depth: int = 0
    top_k: int = 1
    verify: int = 1
    drafter: str = "eagle"

    @property
    def name(self) -> str:
        """off, eagle-3, or for a tree eagle-8_4_48, in fastrl's notation."""
        if not self.depth:
            return "off"
        if self.verify == self.depth + 1:
            return f"{self.drafter}-{self.depth}"
        return f"{self.drafter}-{self.depth}_{self.top_k}_{self.verify}"

    @property
    def model_free(self) -> bool:
        return self.drafter in MODEL_FREE


OFF = DraftShape()


def chain(depth: int, drafter: str = "eagle") -> DraftShape:
    """``depth`` successive drafts."""
    return DraftShape(depth, 1, depth + 1, drafter)


def tokens_per_round(draft: DraftShape, acceptance: float, exponent: float) -> float:
    """Tokens that a request gains per round, including the target's own.

    ``acceptance`` is the probability that a level with one candidate contains the target's token, given that the level
    before did. With w candidates, a miss is w ** -exponent times as likely.
    """
    if not draft.depth:
        return 1.0
    width = max(1.0, (draft.verify - 1) / draft.depth)
    hit = 1.0 - (1.0 - acceptance) * width**-exponent
    return 1.0 + sum(hit**level for level in range(1, draft.depth + 1))


@dataclass
class Alignment:
    """Alignment of a drafter from cold (0) to aligned (1); training raises it, policy updates lower it."""

    constants: Constants
    level: float = 0.0

    def trained(self, steps: float) -> None:
        """Applies optimizer steps on the policy's newest responses."""
        self.level = 1.0 - (1.0 - self.level) * exp(-steps / self.constants.drafter_steps_to_align)

    def updated(self) -> None:
        """Applies one update of the policy."""
        self.level *= exp(-1.0 / self.constants.updates_to_drift)

    def acceptance(self, draft: DraftShape) -> float:
        """Acceptance probability of one candidate."""
        if draft.model_free:
            return self.constants.model_free_acceptance
        cold, aligned = self.constants.cold_acceptance, self.constants.aligned_acceptance
        return cold + (aligned - cold) * self.level

    def tokens(self, draft: DraftShape) -> float:
        """Tokens per round; see ``tokens_per_round``."""
        return tokens_per_round(draft, self.acceptance(draft), self.constants.candidates_exponent)

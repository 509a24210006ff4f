"""Plain data between rollout, actor and algorithm."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainingSample:
    """One prompt with its response, and what the loss needs for it.

    The per-token columns cover the response only: entry ``t`` belongs to ``token_ids[prompt_length + t]``. A column
    that the loss does not use is empty.
    """

    token_ids: tuple[int, ...]
    prompt_length: int
    advantage: float = 1.0
    old_log_probs: tuple[float, ...] = ()
    reference_log_probs: tuple[float, ...] = ()
    token_weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.prompt_length < len(self.token_ids):
            raise ValueError(f"prompt_length {self.prompt_length} of a sample of {len(self.token_ids)} tokens")
        for name in ("old_log_probs", "reference_log_probs", "token_weights"):
            column = getattr(self, name)
            if column and len(column) != self.response_length:
                raise ValueError(f"{name} has {len(column)} entries for a response of {self.response_length} tokens")

    @property
    def response_length(self) -> int:
        return len(self.token_ids) - self.prompt_length


@dataclass(frozen=True)
class TokenScores:
    """What the actor says of one response: per token its log-probability and the entropy of the distribution there."""

    log_probs: tuple[float, ...]
    entropies: tuple[float, ...]

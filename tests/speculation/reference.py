"""A reference implementation that counts occurrences directly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_tlt.speculation.suffix_tree import MAX_TOKEN, SpeculationRule

END = MAX_TOKEN + 1


@dataclass
class Reference:
    """All sequences as lists; ``growing`` ones have not ended."""

    max_depth: int
    sequences: dict[int, tuple[list[int], float]] = field(default_factory=dict)
    growing: set[int] = field(default_factory=set)

    def count(self, string: Sequence[int]) -> float:
        """Weight of all occurrences; an ended sequence is followed by END."""
        string = list(string)
        weight = 0.0
        for handle, (tokens, each) in self.sequences.items():
            whole = tokens if handle in self.growing else [*tokens, END]
            weight += each * sum(whole[i : i + len(string)] == string for i in range(len(whole) - len(string) + 1))
        return weight

    def continuations(self, string: Sequence[int]) -> dict[int, float]:
        """Weight of each known following token."""
        tokens = {token for sequence, _ in self.sequences.values() for token in sequence} | {END}
        counts = {token: self.count([*string, token]) for token in tokens}
        return {token: count for token, count in counts.items() if count}

    def propose(self, handle: int, max_tokens: int, rule: SpeculationRule) -> tuple[list[int], float, int]:
        context = self.sequences[handle][0]
        best: tuple[list[int], float, int] = ([], 0.0, 0)
        for length in range(1, min(len(context), self.max_depth - 1) + 1):
            string = context[-length:]
            if not self.continuations(string):
                break
            draft: list[int] = []
            probability, score = 1.0, 0.0
            limit = min(max_tokens, int(rule.factor * length + rule.offset), self.max_depth - length)
            while len(draft) < limit:
                counts = self.continuations([*string, *draft])
                if not counts:
                    break
                token = min(counts, key=lambda t: (-counts[t], t))
                probability *= counts[token] / sum(counts.values())
                if token == END or probability < rule.min_probability:
                    break
                draft.append(token)
                score += probability
            if draft and score >= best[1]:
                best = (draft, score, length)
        return best

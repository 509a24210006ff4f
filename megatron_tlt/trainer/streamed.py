"""The samples whose gradient a rank accumulated while other engines still decoded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from megatron_tlt.actor.scores import PolicyScores
from megatron_tlt.data.rollout_batch import RolloutBatch
from megatron_tlt.errors import RunError
from megatron_tlt.platform.collectives import all_gather_data
from megatron_tlt.trainer.carried import Key


@dataclass
class Streamed:
    """Of one rollout, by problem and sample; ``states`` on one rank of a data-parallel rank, the rest on all of them.

    ``log_probs`` (G) and ``entropy_sums`` are those of :class:`PolicyScores`, for each sample.
    """

    advantages: dict[Key, float] = field(default_factory=dict)
    log_probs: dict[Key, torch.Tensor] = field(default_factory=dict)
    entropy_sums: dict[Key, torch.Tensor] = field(default_factory=dict)
    states: dict[Key, torch.Tensor] = field(default_factory=dict)

    @property
    def keys(self) -> list[Key]:
        """The samples."""
        return list(self.advantages)

    def add(
        self,
        keys: Sequence[Key],
        advantages: Sequence[float],
        old: PolicyScores | None,
        states: Mapping[int, torch.Tensor],
        lengths: Sequence[int],
    ) -> None:
        """Adds a part; ``states`` and ``old`` are numbered by its samples, whose responses have ``lengths`` tokens."""
        self.advantages |= zip(keys, advantages, strict=True)
        if old is not None:
            self.log_probs |= zip(keys, old.log_probs_G.split(list(lengths)), strict=True)
            self.entropy_sums |= zip(keys, old.entropy_sums_H, strict=True)
        self.states |= {keys[i]: hidden for i, hidden in states.items()}

    def of_all_ranks(self, places: Mapping[Key, int]) -> set[int]:
        """The places of the samples that any rank has accumulated; a collective over the world."""
        everyone = all_gather_data([places[key] for key in self.keys], list[int])
        return {place for one in everyone for place in one}

    def merged(
        self, old: PolicyScores | None, batch: RolloutBatch, rest: Sequence[int], mine: Mapping[int, Key]
    ) -> PolicyScores | None:
        """The scores of a batch's held samples: ``old``, numbered by those of its ``rest``, and ``mine``, by place."""
        if old is None:
            return None
        places = [rest[i] for i in old.samples]
        log_probs = old.log_probs_G.split([batch.response_length(i) for i in places])
        found = dict(zip(places, zip(log_probs, old.entropy_sums_H, strict=True), strict=True))
        found |= {place: (self.log_probs[key], self.entropy_sums[key]) for place, key in mine.items()}
        order = sorted(found)
        return PolicyScores(
            tuple(order),
            torch.cat([old.log_probs_G[:0], *(found[i][0] for i in order)]),
            torch.tensor([float(found[i][1]) for i in order], dtype=torch.float64),
        )

    def check(self, algorithm: str, now: Mapping[Key, float]) -> None:
        """Compares the advantages that samples were accumulated with to those that the whole batch gives.

        Raises:
            RunError: they differ: the algorithm is not ``per_problem``, though it says so.
        """
        for key, before in self.advantages.items():
            if not math.isclose(now[key], before, rel_tol=1e-6, abs_tol=1e-9):
                raise RunError(
                    f"algorithm.name: {algorithm} is per_problem, but gave response {key[1]} to problem {key[0]} the "
                    f"advantage {before} among its problem's alone and {now[key]} in the batch; allowed: the same"
                )

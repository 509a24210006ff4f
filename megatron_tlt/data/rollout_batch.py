"""The samples of a step as tensors, from the engine to the loss: ragged, and sharded over the ranks.

Every rank knows all samples of the batch by their lengths, rewards, advantages and versions. It has the tokens and the
columns per token of those samples alone that it holds. Sequences lie one behind another, without padding.

Shapes: N samples, H of them held by this rank; S tokens of the held sequences, prompt and response; G of these are
generated, the tokens of the responses. All tensors are on the host.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch

RESPONSE_COLUMNS = {
    "rollout_log_probs_G": torch.float32,
    "old_log_probs_G": torch.float32,
    "reference_log_probs_G": torch.float32,
    "token_weights_G": torch.float32,
    "loss_mask_G": torch.bool,
    "versions_G": torch.int32,
}
"""Columns with an entry per response token, and their types."""
TOKENS = "tokens_S"
ROUTES = "routes_SF"
"""Rows per token of prompt and response, uint8."""
_PER_SAMPLE = {
    "prompt_lengths_N": torch.int64,
    "lengths_N": torch.int64,
    "rewards_N": torch.float64,
    "advantages_N": torch.float64,
    "versions_N": torch.int64,
}


@dataclass(frozen=True)
class RolloutBatch:
    """N samples, of which this rank holds the tokens of H.

    A column per response token is None where nothing reads it: the entry for token ``prompt_length + t`` of a sample is
    its t-th. A column has the same state on all ranks that hold a sample.

    Args:
        prompt_lengths_N: tokens of the prompts, int64.
        lengths_N: tokens of prompts and responses, int64.
        rewards_N: float64.
        advantages_N: float64, so that a step computes with what the algorithm gave.
        versions_N: RL steps whose updates the sampling policy had seen, int64.
        held: the held samples, ascending.
        tokens_S: int32.
        rollout_log_probs_G: of the distribution that was sampled from (nats), float32.
        old_log_probs_G: of the policy before the step's first update, float32.
        reference_log_probs_G: of the frozen first policy, float32.
        token_weights_G: a factor for a token's part of the loss, float32; 1 where there is none.
        versions_G: as ``versions_N``, of each token; where responses of earlier steps were continued.
        loss_mask_G: False leaves a token out of the loss, bool; all True where there is none.
        routes_SF: the experts that the engine chose for each token (``data.routes``), F bytes, uint8.

    Raises:
        ValueError: shapes or types that contradict each other, a prompt or a response without tokens.
    """

    prompt_lengths_N: torch.Tensor
    lengths_N: torch.Tensor
    rewards_N: torch.Tensor
    advantages_N: torch.Tensor
    versions_N: torch.Tensor
    held: tuple[int, ...]
    tokens_S: torch.Tensor
    rollout_log_probs_G: torch.Tensor | None = None
    old_log_probs_G: torch.Tensor | None = None
    reference_log_probs_G: torch.Tensor | None = None
    token_weights_G: torch.Tensor | None = None
    loss_mask_G: torch.Tensor | None = None
    versions_G: torch.Tensor | None = None
    routes_SF: torch.Tensor | None = None

    def __post_init__(self) -> None:
        for name, dtype in _PER_SAMPLE.items():
            _check(name, getattr(self, name), (self.num_samples,), dtype)
        wrong = (self.prompt_lengths_N < 1) | (self.prompt_lengths_N >= self.lengths_N)
        if wrong.any():
            i = int(wrong.nonzero()[0])
            raise ValueError(f"sample {i}: a prompt of {self.prompt_lengths[i]} of {self.lengths[i]} tokens")
        if list(self.held) != sorted({*self.held} & {*range(self.num_samples)}):
            raise ValueError(f"held samples {self.held}; allowed: ascending, 0 to {self.num_samples - 1}")
        _check(TOKENS, self.tokens_S, (self._starts[-1],), torch.int32)
        for name, column in self.columns.items():
            _check(name, column, (self._response_starts[-1],), RESPONSE_COLUMNS[name])
        if self.routes_SF is not None:
            _check(ROUTES, self.routes_SF, (self._starts[-1], self.routes_SF.shape[-1]), torch.uint8)

    @staticmethod
    def of_sequences(
        sequences: Sequence[Sequence[int]],
        prompt_lengths: Sequence[int],
        advantages: Sequence[float] | None = None,
        **columns: torch.Tensor | None,
    ) -> RolloutBatch:
        """A batch of token ids, all held; advantages are 1 where none are given, rewards and versions 0."""
        count = len(sequences)
        return RolloutBatch(
            prompt_lengths_N=torch.tensor(prompt_lengths, dtype=torch.int64),
            lengths_N=torch.tensor([len(tokens) for tokens in sequences], dtype=torch.int64),
            rewards_N=torch.zeros(count, dtype=torch.float64),
            advantages_N=torch.tensor([1.0] * count if advantages is None else advantages, dtype=torch.float64),
            versions_N=torch.zeros(count, dtype=torch.int64),
            held=tuple(range(count)),
            tokens_S=torch.cat([torch.empty(0, dtype=torch.int32), *map(_int32, sequences)]),
            **columns,
        )

    @property
    def num_samples(self) -> int:
        """N."""
        return len(self.lengths_N)

    @cached_property
    def lengths(self) -> list[int]:
        """``lengths_N`` as numbers."""
        return [int(n) for n in self.lengths_N]

    @cached_property
    def prompt_lengths(self) -> list[int]:
        """``prompt_lengths_N`` as numbers."""
        return [int(n) for n in self.prompt_lengths_N]

    def response_length(self, sample: int) -> int:
        """Tokens of a sample's response."""
        return self.lengths[sample] - self.prompt_lengths[sample]

    @property
    def columns(self) -> dict[str, torch.Tensor]:
        """The columns per response token that there are, (G) each."""
        found = {name: getattr(self, name) for name in RESPONSE_COLUMNS}
        return {name: column for name, column in found.items() if column is not None}

    def tokens(self, sample: int) -> torch.Tensor:
        """A held sample's prompt and response, a view; raises KeyError if this rank does not hold it."""
        at = self._places[sample]
        return self.tokens_S[self._starts[at] : self._starts[at + 1]]

    def routes(self, sample: int) -> torch.Tensor:
        """A held sample's rows of ``routes_SF``, a view; raises KeyError if this rank does not hold it."""
        at = self._places[sample]
        assert self.routes_SF is not None
        return self.routes_SF[self._starts[at] : self._starts[at + 1]]

    def response(self, name: str, sample: int) -> torch.Tensor:
        """A held sample's entries of the column ``name``, or its response tokens for ``tokens_S``; a view.

        Raises:
            KeyError: this rank does not hold the sample, or there is no such column.
        """
        if name == TOKENS:
            return self.tokens(sample)[self.prompt_lengths[sample] :]
        at = self._places[sample]
        return self.columns[name][self._response_starts[at] : self._response_starts[at + 1]]

    def with_columns(self, **columns: torch.Tensor | None) -> RolloutBatch:
        """The batch with these columns, per sample or per response token, in place of its own; None drops one."""
        return replace(self, **columns)  # type: ignore[arg-type]

    def holding(self, samples: Collection[int]) -> RolloutBatch:
        """All samples, but the tokens and columns of ``samples`` alone.

        Raises:
            KeyError: this rank does not hold one of them.
        """
        kept = tuple(sorted(samples))
        return self if kept == self.held else replace(self, held=kept, **self.rows(kept))

    def rows(self, samples: Sequence[int]) -> dict[str, torch.Tensor]:
        """Tokens and columns of held ``samples``, one behind another in the order given, by name.

        Raises:
            KeyError: this rank does not hold one of them.
        """
        found = {TOKENS: _joined(self.tokens_S, [self.tokens(i) for i in samples])}
        for name, column in self.columns.items():
            found[name] = _joined(column, [self.response(name, i) for i in samples])
        if self.routes_SF is not None:
            found[ROUTES] = _joined(self.routes_SF, [self.routes(i) for i in samples])
        return found

    def select(self, samples: Sequence[int]) -> RolloutBatch:
        """A batch of these samples alone, in the order given and numbered anew; each may occur once.

        Raises:
            ValueError: one occurs twice.
        """
        chosen = [int(i) for i in samples]
        if chosen == list(range(self.num_samples)):
            return self
        if len(set(chosen)) != len(chosen):
            raise ValueError(f"samples {chosen}; allowed: each once")
        index_N = torch.tensor(chosen, dtype=torch.int64)
        held = tuple(at for at, i in enumerate(chosen) if i in self._places)
        per_sample = {name: getattr(self, name)[index_N] for name in _PER_SAMPLE}
        return RolloutBatch(held=held, **per_sample, **self.rows([chosen[at] for at in held]))

    @staticmethod
    def concatenate(batches: Sequence[RolloutBatch]) -> RolloutBatch:
        """The samples of all batches, one batch behind another, numbered anew.

        Raises:
            ValueError: batches with held samples differ in their columns.
        """
        first = list(accumulate((batch.num_samples for batch in batches), initial=0))
        names = {name for batch in batches for name in batch.columns}
        if any(batch.held and batch.columns.keys() != names for batch in batches):
            raise ValueError(f"batches with the columns {[sorted(b.columns) for b in batches]}; allowed: all the same")
        held = tuple(start + i for start, batch in zip(first, batches, strict=False) for i in batch.held)
        columns = {}
        for name in names:
            empty = torch.empty(0, dtype=RESPONSE_COLUMNS[name])
            columns[name] = torch.cat([batch.columns.get(name, empty) for batch in batches])
        if routes := [batch.routes_SF for batch in batches if batch.routes_SF is not None]:
            columns[ROUTES] = torch.cat(routes)
        per_sample = {name: torch.cat([getattr(batch, name) for batch in batches]) for name in _PER_SAMPLE}
        return RolloutBatch(held=held, tokens_S=torch.cat([b.tokens_S for b in batches]), **per_sample, **columns)

    @cached_property
    def _places(self) -> dict[int, int]:
        return {sample: at for at, sample in enumerate(self.held)}

    @cached_property
    def _starts(self) -> list[int]:
        return _ends(self.lengths[i] for i in self.held)

    @cached_property
    def _response_starts(self) -> list[int]:
        return _ends(self.response_length(i) for i in self.held)


def _ends(lengths: Iterable[int]) -> list[int]:
    return list(accumulate(lengths, initial=0))


def _int32(values: Sequence[int]) -> torch.Tensor:
    """Token ids as a tensor, without a Python object for each where they are an array already."""
    return torch.from_numpy(np.asarray(values, dtype=np.int32))


def _joined(like: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(parts)) if parts else like[:0]


def _check(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        found = f"{tuple(tensor.shape)} of {tensor.dtype}"
        raise ValueError(f"{name} has shape {found}; allowed: {shape} of {dtype}")

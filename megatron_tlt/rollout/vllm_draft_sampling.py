"""Chooses a head's draft tokens: the most likely ones, or samples whose distribution the verification uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron_tlt.errors import RunError
from megatron_tlt.platform.copies import copy_to_device
from megatron_tlt.rollout.inverse_sampling import sample_by_inversion
from megatron_tlt.speculation.uniforms import Use, uniforms


@dataclass(frozen=True)
class DraftedRow:
    """A request in a head's pass that gets up to ``limit`` draft tokens, from ``position`` on."""

    internal_id: str
    temperature: float
    seed: int
    position: int
    limit: int


class DraftsEnded(Exception):
    """Ends the proposer's loop over depths: no request takes further draft tokens."""


class DraftSampler:
    """Replaces the choice of draft tokens in vLLM's proposer, and supplies their probabilities for verification.

    It reads only the head's own logits. vLLM would expand the logits of a reduced draft vocabulary to the target's
    vocabulary before taking the maximum.

    A token x sampled from draft distribution q is accepted with probability min(1, p(x) / q(x)) under the target's p.
    The acceptance rate is sum_x min(p(x), q(x)) (Leviathan et al., 2023); for a deterministic draft it is p(x). Only
    the temperature shapes q; the target's top-k and top-p shape p. The output follows p in either case. This also holds
    for a sampled draft that is verified as a deterministic one. That happens where q is no longer known (the scheduler
    left the request out of a step) or is not finite (a diverged head).

    Drafts end before the first one below the required probability. The criterion is the probability of the most likely
    token, known before sampling: dropping drafts by their sampled token would bias the output.

    Distributions of pending drafts take (requests, drafts, draft vocabulary) floats on the device.
    """

    def __init__(self, runner: Any, probabilistic: bool) -> None:
        """Replace the choice of draft tokens in ``runner``'s proposer."""
        self._runner = runner
        self._proposer = runner.drafter
        self._probabilistic = probabilistic
        self._waiting: dict[str, torch.Tensor] = {}  # (drafts, draft vocabulary) by request
        self.begin(())
        self._proposer._sample_draft_tokens = self._sample
        if probabilistic:
            runner._get_spec_decode_draft_probs = self._probabilities

    def clear(self) -> None:
        """Drop all pending drafts."""
        self._waiting = {}

    def begin(self, rows: Sequence[DraftedRow], least_probability: float = 0.0) -> None:
        """Start a pass that drafts for these requests, in this order.

        A request's drafts end before the first position where the product of the most likely tokens' probabilities is
        below ``least_probability``, for sampled drafts too.
        """
        self._rows, self._least = rows, least_probability
        self._tokens: list[torch.Tensor] = []  # per depth: the target's ids (rows)
        self._drawn: list[torch.Tensor] = []  # per depth: (rows, draft vocabulary)
        self._draws = self._probabilistic and any(row.temperature > 0.0 for row in rows)
        if self._draws or least_probability:
            seeds = np.array([row.seed for row in rows], dtype=np.uint64)
            positions = np.array([row.position for row in rows], dtype=np.uint64)
            depths = np.arange(max(row.limit for row in rows), dtype=np.uint64)[:, None]
            numbers, temperatures, self._counts, self._chances = copy_to_device(
                [
                    uniforms(Use.DRAFT, seeds, positions + depths),
                    np.array([[row.temperature] for row in rows], dtype=np.float32),
                    np.array([row.limit for row in rows]),
                    np.ones(len(rows), dtype=np.float32),
                ],
                self._runner.device,
            )
            self._uniforms = numbers  # (depths, rows)
            # ``_counts``: draft tokens of each request; ``_chances``: product over the most likely tokens so far
            self._greedy = temperatures[:, 0] <= 0.0
            self._divisors = torch.where(temperatures <= 0.0, 1.0, temperatures)

    def end(self) -> list[list[int]]:
        """Return each request's drafts, which are then pending verification."""
        rows, self._rows = self._rows, ()
        if not self._tokens:
            return [[] for _ in rows]
        counts = [row.limit for row in rows]
        if self._least:
            *columns, counts = torch.stack([*self._tokens, self._counts]).tolist()
        else:
            columns = torch.stack(self._tokens).tolist()
        drafts = list(zip(*columns, strict=True))
        if self._drawn:
            by_row = torch.stack(self._drawn, dim=1)
            self._waiting = {row.internal_id: by_row[i, : counts[i]] for i, row in enumerate(rows) if counts[i]}
        self._tokens, self._drawn = [], []
        return [list(draft[:count]) for draft, count in zip(drafts, counts, strict=True)]

    def _model(self) -> Any:
        model = self._proposer.model
        return model.unwrap() if hasattr(model, "unwrap") else model

    def _offsets(self) -> torch.Tensor | None:
        """The target's ids of the draft vocabulary minus its own ids; None for the full vocabulary."""
        return getattr(self._model(), "draft_id_to_target_id", None)

    def _sample(self, hidden_states: torch.Tensor, _: Any) -> tuple[torch.Tensor, None]:
        """Replacement of the proposer's ``_sample_draft_tokens``: final states (rows, hidden) -> target ids (rows).

        Raises:
            DraftsEnded: no request takes this or a later draft token.
        """
        model, offsets = self._model(), self._offsets()
        if offsets is None:
            logits = model.compute_logits(hidden_states)
        else:
            logits = model.logits_processor(model.lm_head, hidden_states)
        tokens = logits.argmax(dim=-1)
        if self._draws or self._least:
            probs = (logits.float() / self._divisors).softmax(dim=-1)
            if self._least:
                self._end_unsure(probs)
            if self._draws:
                tokens = self._draw(probs, tokens)
        tokens = tokens if offsets is None else tokens + offsets[tokens]
        self._tokens.append(tokens)
        return tokens, None

    def _end_unsure(self, probs: torch.Tensor) -> None:
        """End the drafts of requests whose next token is too unlikely; ``probs`` (rows, draft vocabulary) are its.

        A GPU drafts to the last depth: to ask it for the counts would cost more than a depth of the head.
        """
        depth = len(self._tokens)
        self._chances *= probs.amax(dim=-1)
        sure = self._chances >= self._least  # False for NaN
        self._counts = torch.where(sure, self._counts, self._counts.clamp(max=depth))
        if not self._counts.is_cuda and int(self._counts.max()) <= depth:
            raise DraftsEnded

    def _draw(self, probs: torch.Tensor, likeliest: torch.Tensor) -> torch.Tensor:
        """Draft ids (rows) by inversion of the distribution function."""
        self._drawn.append(probs)
        return torch.where(self._greedy, likeliest, sample_by_inversion(probs, self._uniforms[len(self._tokens)]))

    def _probabilities(self, metadata: Any) -> torch.Tensor | None:
        """Replacement of the runner's ``_get_spec_decode_draft_probs``; None if all drafts are deterministic.

        Returns:
            Draft probabilities (draft tokens, vocabulary).

        Raises:
            RunError: the head's vocabulary differs from the target's.
        """
        parts: list[torch.Tensor] = []
        rows: list[int] = []
        start = 0
        for internal_id, count in zip(self._runner.input_batch.req_ids, metadata.num_draft_tokens, strict=True):
            drawn = self._waiting.get(internal_id)
            if drawn is not None and count:
                parts.append(drawn[:count])
                rows += range(start, start + len(parts[-1]))
            start += count
        if not parts:
            return None
        probs, offsets, width = torch.cat(parts), self._offsets(), self._runner.input_batch.vocab_size
        if offsets is not None:
            targets = offsets + torch.arange(len(offsets), device=offsets.device)
            probs = probs.new_zeros(len(probs), width).index_add_(1, targets, probs)
        if probs.shape[-1] != width:
            raise RunError(f"the drafter draws from {probs.shape[-1]} tokens; allowed: the target's {width}")
        ids = metadata.draft_token_ids.long().clamp(min=0)[:, None]
        whole = probs
        if len(rows) < len(ids):
            whole = probs.new_zeros(len(ids), width)
            places, certain = copy_to_device(
                [np.array(rows), np.setdiff1d(np.arange(len(ids)), rows, assume_unique=True)], probs.device
            )
            whole[places] = probs
            whole[certain] = torch.zeros_like(whole[certain]).scatter_(1, ids[certain], 1.0)
        finite = whole.isfinite().all(dim=-1, keepdim=True)
        whole.masked_fill_(~finite, 0.0)
        return whole.scatter_(1, ids, torch.where(finite, whole.gather(1, ids), 1.0))

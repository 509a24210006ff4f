"""Which token a head drafts: its likeliest, or one drawn from its distribution, which the verifier then knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron_tlt.errors import RunError
from megatron_tlt.speculation.draft_uniforms import draft_uniforms


@dataclass(frozen=True)
class DraftedRow:
    """A request in a head's pass, which is to get up to ``limit`` drafts, from ``position`` on."""

    internal_id: str
    temperature: float
    seed: int
    position: int
    limit: int


class DraftsEnded(Exception):
    """No request of a head's pass takes further drafts: what ends the proposer's loop over depths."""


class DraftSampler:
    """Stands where vLLM's proposer chooses a draft token from the head's final states, and where drafts are verified.

    Only the logits that the head has are looked at: vLLM spreads those of a small draft vocabulary over the target's
    whole one before it takes the largest.

    A drawn token x of draft distribution q is accepted with probability min(1, p(x) / q(x)) under the target's p, so
    sum_x min(p(x), q(x)) of the drafts are (Leviathan et al., 2023), where a certain draft has p(x). Only the
    temperature shapes q; the target's top-k and top-p shape p, and the result is p's either way. So it is for a drawn
    draft that is verified as a certain one, which is what happens where q is not known any more (the scheduler left
    its request out of a step) or is not finite (a head that diverged).

    A draft that is less likely than asked for is not made, and none after it. What decides is the probability of the
    likeliest token, known before one is drawn: to leave out drafts by what was drawn would change what is sampled.

    The distributions of drafts that wait take (requests, drafts, draft vocabulary) floats of the device.
    """

    def __init__(self, runner: Any, probabilistic: bool) -> None:
        """Take over the choice of draft tokens in ``runner``'s proposer."""
        self._runner = runner
        self._proposer = runner.drafter
        self._probabilistic = probabilistic
        self._waiting: dict[str, torch.Tensor] = {}  # (drafts, draft vocabulary) by request
        self.begin(())
        self._proposer._sample_draft_tokens = self._sample
        if probabilistic:
            runner._get_spec_decode_draft_probs = self._probabilities

    def clear(self) -> None:
        """No draft waits for verification."""
        self._waiting = {}

    def begin(self, rows: Sequence[DraftedRow], least_probability: float = 0.0) -> None:
        """The head is about to draft for these requests, in this order.

        A request's drafts end before the first one whose likeliest token has, with the likeliest ones before it, a
        probability below ``least_probability``: where tokens are drawn too.
        """
        self._rows, self._least = rows, least_probability
        self._tokens: list[torch.Tensor] = []  # of each depth: the target's ids (rows)
        self._drawn: list[torch.Tensor] = []  # of each depth: (rows, draft vocabulary)
        self._counts = [row.limit for row in rows]  # drafts that each request takes
        if self._probabilistic:
            self._seeds = np.array([row.seed for row in rows], dtype=np.uint64)
            self._positions = np.array([row.position for row in rows], dtype=np.uint64)
        if self._probabilistic or least_probability:
            temperatures = torch.tensor([row.temperature for row in rows])
            self._greedy = temperatures <= 0.0
            self._divisors = torch.where(self._greedy, 1.0, temperatures)[:, None]
            self._chances = torch.ones(len(rows))  # of all likeliest tokens so far

    def end(self) -> list[list[int]]:
        """Each request's drafts, which wait for verification."""
        rows, self._rows = self._rows, ()
        if not self._tokens:
            return [[] for _ in rows]
        counts = self._counts
        if self._drawn:
            by_row = torch.stack(self._drawn, dim=1)
            self._waiting = {row.internal_id: by_row[i, : counts[i]] for i, row in enumerate(rows) if counts[i]}
        drafts = torch.stack(self._tokens, dim=1).tolist()
        self._tokens, self._drawn = [], []
        return [draft[:count] for draft, count in zip(drafts, counts, strict=True)]

    def _model(self) -> Any:
        model = self._proposer.model
        return model.unwrap() if hasattr(model, "unwrap") else model

    def _offsets(self) -> torch.Tensor | None:
        """The target's ids of the draft vocabulary less its own; None where it is the whole."""
        return getattr(self._model(), "draft_id_to_target_id", None)

    def _sample(self, hidden_states: torch.Tensor, _: Any) -> tuple[torch.Tensor, None]:
        """The proposer's ``_sample_draft_tokens``: final states (rows, hidden) -> the target's token ids (rows).

        Raises:
            DraftsEnded: no request takes the draft, or any after it.
        """
        model, offsets = self._model(), self._offsets()
        if offsets is None:
            logits = model.compute_logits(hidden_states)
        else:
            logits = model.logits_processor(model.lm_head, hidden_states)
        tokens = logits.argmax(dim=-1)
        draws = self._probabilistic and not bool(self._greedy.all())
        if draws or self._least:
            probs = (logits.float() / self._divisors.to(logits.device)).softmax(dim=-1)
            if self._least:
                self._end_unsure(probs)
            if draws:
                tokens = self._draw(probs, tokens)
        tokens = tokens if offsets is None else tokens + offsets[tokens]
        self._tokens.append(tokens)
        return tokens, None

    def _end_unsure(self, probs: torch.Tensor) -> None:
        """End the drafts of requests whose next one is too unlikely; ``probs`` (rows, draft vocabulary) is its."""
        depth = len(self._tokens)
        self._chances *= probs.amax(dim=-1).cpu()
        sure = (self._chances >= self._least).tolist()  # not where it is not a number
        self._counts = [count if ok else min(count, depth) for count, ok in zip(self._counts, sure, strict=True)]
        if max(self._counts) <= depth:
            raise DraftsEnded

    def _draw(self, probs: torch.Tensor, likeliest: torch.Tensor) -> torch.Tensor:
        """Draft ids (rows) by inversion of the distribution function."""
        device = probs.device
        uniforms = draft_uniforms(self._seeds, self._positions + np.uint64(len(self._tokens)))
        sums = probs.double().cumsum(dim=-1)
        levels = torch.from_numpy(uniforms).to(device)[:, None] * sums[:, -1:]
        drawn = torch.searchsorted(sums, levels, right=True)[:, 0].clamp_(max=probs.shape[-1] - 1)
        self._drawn.append(probs)
        return torch.where(self._greedy.to(device), likeliest, drawn)

    def _probabilities(self, metadata: Any) -> torch.Tensor | None:
        """The runner's ``_get_spec_decode_draft_probs``: (draft tokens, vocabulary); None where all are certain.

        Raises:
            RunError: the head's vocabulary is not the target's.
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
        finite = probs.isfinite().all(-1)
        ids = metadata.draft_token_ids.long().clamp(min=0)
        known = torch.zeros(len(ids), dtype=torch.bool, device=probs.device)
        known[torch.tensor(rows, device=probs.device)] = finite
        if bool(known.all()):
            return probs.contiguous()
        whole = torch.nn.functional.one_hot(ids, width).to(probs)
        whole[known] = probs[finite]
        return whole

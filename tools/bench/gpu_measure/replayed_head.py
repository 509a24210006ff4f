"""A real head with a set acceptance: it runs with all its cost, and its drafts are exchanged for replayed ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_tlt.bench.rollout_cases import ReplayDrafter
from megatron_tlt.rollout.vllm_draft_sampling import DraftedRow


class ReplayedHead:
    """Stands where an engine's head returns its drafts (``DraftSampler``).

    Whether a draft is right depends only on request and position: each is with probability ``acceptance``. The
    drafts' number is the head's own.
    """

    def __init__(self, engine: Any, responses: Mapping[str, Sequence[int]], acceptance: float) -> None:
        self._switch = engine._switch
        self._sampler = self._switch._sampler
        self._replay = ReplayDrafter(responses, acceptance, engine.vocab_size)
        self._rows: Sequence[DraftedRow] = ()
        self._switch._sampler = self

    def begin(self, rows: Sequence[DraftedRow], least_probability: float = 0.0) -> None:
        """See ``DraftSampler.begin``."""
        self._rows = rows
        self._sampler.begin(rows, least_probability)

    def end(self) -> list[list[int]]:
        """The replayed drafts, as many for each request as the head made."""
        made = self._sampler.end()
        return [self._replayed(row, len(drafts)) for row, drafts in zip(self._rows, made, strict=True)]

    def clear(self) -> None:
        """See ``DraftSampler.clear``."""
        self._sampler.clear()

    def _replayed(self, row: DraftedRow, count: int) -> list[int]:
        if not count:
            return []
        name = self._switch.external_id(row.internal_id)
        prompt = self._switch._tracked[row.internal_id].request.prompt_token_ids
        self._replay.start(name, "", prompt)
        self._replay.extend(name, range(row.position - len(prompt)))
        found = list(self._replay.propose(name, count).tokens)
        self._replay.finish(name)
        return found

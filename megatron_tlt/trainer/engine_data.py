"""Training data of the spot trainer: the responses that an engine has just finished."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_tlt.drafter import Entry
from megatron_tlt.drafter.entry import MAX_KEY_CHARACTERS
from megatron_tlt.rollout.recorded_states import RecordedResponse, RecordedStates


class EngineData:
    """This rank's share of the responses that its engine records during a rollout.

    Args:
        recorded: the engine's record, which is the same on all ranks of the engine.
        rank: this rank's position among the engine's ``ranks``; each of them takes some of the responses.
    """

    def __init__(self, recorded: RecordedStates, rank: int, ranks: int) -> None:
        self._recorded, self._rank, self._ranks = recorded, rank, ranks

    def begin(self) -> None:
        """Starts recording for a new rollout."""
        self._recorded.begin()

    @property
    def count(self) -> int:
        """Approximate number of this rank's responses; cheap to compute."""
        return self._recorded.num_finished // self._ranks

    @property
    def dropped(self) -> int:
        """Responses of the rollout whose states are incomplete or were dropped for lack of memory."""
        return self._recorded.dropped // self._ranks

    def entries(self, step: int) -> list[Entry]:
        """Returns the responses; call it once. Takes about a second for some hundred thousand tokens."""
        return entries_of(self._recorded.take(self._rank, self._ranks), step)

    def end(self) -> None:
        """Frees the recorded states."""
        self._recorded.end()


def entries_of(responses: Sequence[RecordedResponse], step: int) -> list[Entry]:
    """Converts an engine's records to buffer entries; rewards are not known yet and are set to 1."""
    entries = [
        Entry(
            key=f"{step}/engine/{one.request_id}"[:MAX_KEY_CHARACTERS],
            step=step,
            token_ids=torch.tensor(one.token_ids[: len(one.hidden)], dtype=torch.int32),
            prompt_length=one.prompt_length,
            hidden=one.hidden,
            reward=1.0,
        )
        for one in responses
        if len(one.hidden) > one.prompt_length
    ]
    return [entry for entry in entries if entry.num_drafted]

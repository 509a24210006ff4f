"""The responses that an engine has just ended, as the drafter learns from them in the bubble."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_tlt.drafter import Entry
from megatron_tlt.drafter.entry import MAX_KEY_CHARACTERS
from megatron_tlt.rollout.recorded_states import RecordedResponse, RecordedStates


class EngineData:
    """This rank's part of what its engine records in a rollout.

    Args:
        recorded: by the engine; of several ranks to an engine, each records the same.
        rank: within the engine, of ``ranks``: each takes some of the responses.
    """

    def __init__(self, recorded: RecordedStates, rank: int, ranks: int) -> None:
        self._recorded, self._rank, self._ranks = recorded, rank, ranks

    def begin(self) -> None:
        """The rollout begins."""
        self._recorded.begin()

    @property
    def count(self) -> int:
        """Responses that there are about; says so at once."""
        return self._recorded.num_finished // self._ranks

    @property
    def dropped(self) -> int:
        """Responses of the rollout whose states were given up for want of memory, or are not whole."""
        return self._recorded.dropped // self._ranks

    def entries(self, step: int) -> list[Entry]:
        """The responses, once; takes a second for some hundred thousand tokens."""
        return entries_of(self._recorded.take(self._rank, self._ranks), step)

    def end(self) -> None:
        """Gives their memory back."""
        self._recorded.end()


def entries_of(responses: Sequence[RecordedResponse], step: int) -> list[Entry]:
    """What an engine recorded, as the drafter learns from it; rewards are not known yet, and count as 1."""
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

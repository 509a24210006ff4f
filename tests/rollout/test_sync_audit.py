"""Tensors that our code reads on the host in an engine step: on a GPU the host waits for each.

The numbers may neither grow with the batch, nor with the length of drafts, nor beyond those noted here. The second
runner's are in ``test_runner_v2.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch

from megatron_tlt.rollout.recorded_states import LateCopies, RecordedStates
from megatron_tlt.speculation.strategy import OFF, Strategy

from .host_reads import reads_of

if TYPE_CHECKING:
    from megatron_tlt.rollout.vllm_engine import VllmEngine

ALLOWED = {
    "off": {},
    "off, recording": {},
    # all drafts of a step together
    "head": {"vllm_draft_sampling.py:end": 1},
    "head, recording": {"vllm_draft_sampling.py:end": 1},
    "head, unsure drafts ended": {"vllm_draft_sampling.py:end": 1},
}


@pytest.fixture
def recorded(drafting: VllmEngine) -> Iterator[RecordedStates]:
    """Records the engine's rollouts once begun."""
    recorded = RecordedStates(1 << 26)
    drafting.record_into(recorded)
    yield recorded
    drafting.record_into(None)


@pytest.mark.parametrize("kind", ALLOWED)
def test_an_engine_step_reads_as_little_as_noted(
    drafting: VllmEngine, recorded: RecordedStates, prompt: tuple[int, ...], kind: str
) -> None:
    head = drafting.drafters[-1]
    least = 5 if kind.endswith("ended") else 0
    strategies = [OFF] if kind.startswith("off") else [Strategy(head, n, least_percent=least) for n in (2, 3)]
    found = []
    for strategy in strategies:
        for requests in (2, 24):
            if kind.endswith("recording"):
                recorded.begin()
            found.append(reads_of(drafting, strategy, requests, prompt))
            assert len(recorded.take()) == (requests if kind.endswith("recording") else 0)
    assert all(each == ALLOWED[kind] for each in found), f"host reads by function: {found}; allowed: {ALLOWED[kind]}"


def test_a_copy_that_waits_is_found(
    drafting: VllmEngine, recorded: RecordedStates, prompt: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy(copies: LateCopies, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return tensor.to("cpu", dtype)

    monkeypatch.setattr(LateCopies, "copy", copy)
    recorded.begin()
    assert reads_of(drafting, OFF, 2, prompt) == {"test_sync_audit.py:copy": 1}

"""What a drawn draft is verified with, where the head's distribution is known, not known any more, or not a number."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_tlt.errors import RunError
from megatron_tlt.rollout.vllm_draft_sampling import DraftedRow, DraftSampler

WIDTH, IDS = 8, (1, 4, 6)
FINAL = torch.eye(3)  # of three requests; the head's logits are the states themselves


class _Head:
    """A head of three tokens of the target's eight, whose logits are what it reads."""

    draft_id_to_target_id = torch.tensor(IDS) - torch.arange(3)
    lm_head = None

    def logits_processor(self, _: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * 2.0


def runner_of(model: Any, *req_ids: str) -> Any:
    batch = SimpleNamespace(req_ids=list(req_ids), vocab_size=WIDTH)
    return SimpleNamespace(drafter=SimpleNamespace(model=model), input_batch=batch)


def rows(*temperatures: float) -> list[DraftedRow]:
    return [DraftedRow(name, t, 11, 5, 2) for name, t in zip("abc", temperatures, strict=True)]


def drawn(runner: Any, hidden: torch.Tensor, *temperatures: float) -> list[list[int]]:
    """Two drafts of each request; they then wait."""
    sampler = DraftSampler(runner, probabilistic=True)
    sampler.begin(rows(*temperatures))
    drafts = torch.stack([runner.drafter._sample_draft_tokens(hidden, None)[0] for _ in range(2)], dim=1).tolist()
    sampler.end()
    return drafts


def metadata(drafts: list[list[int]]) -> Any:
    flat = [token for row in drafts for token in row]
    ids = torch.tensor(flat, dtype=torch.int32)
    return SimpleNamespace(num_draft_tokens=[len(row) for row in drafts], draft_token_ids=ids)


def test_known_drafts_have_their_distribution_and_others_are_certain() -> None:
    runner = runner_of(_Head(), "z", "b", "a")  # z: padded by the scheduler, or left out of the step before
    drafts = drawn(runner, FINAL, 1.0, 0.5, 0.0)
    assert {token for row in drafts for token in row} <= set(IDS) and drafts[2] == [6, 6]
    probs = runner._get_spec_decode_draft_probs(metadata([[-1, 3], drafts[1][:1], drafts[0]]))
    assert probs.shape == (5, WIDTH)
    expected = torch.zeros(2, WIDTH)
    expected[:, IDS] = torch.stack([(FINAL[1] * 4.0).softmax(-1), (FINAL[0] * 2.0).softmax(-1)])
    torch.testing.assert_close(probs[[2, 3, 4]], expected[[0, 1, 1]])
    assert probs[0].argmax() == 0 and probs[1].argmax() == 3 and probs[:2].sum() == 2.0


def test_a_head_that_diverged_is_verified_as_certain() -> None:
    runner = runner_of(_Head(), "a", "b", "c")
    drafts = drawn(runner, torch.full((3, 3), torch.nan), 1.0, 1.0, 1.0)
    probs = runner._get_spec_decode_draft_probs(metadata(drafts))
    assert probs.argmax(-1).tolist() == [token for row in drafts for token in row]
    assert torch.equal(probs.sum(-1), torch.ones(6))


def test_greedy_requests_and_cleared_drafts_have_none() -> None:
    runner = runner_of(_Head(), "a", "b", "c")
    drafts = drawn(runner, FINAL, 0.0, 0.0, 0.0)
    assert drafts == [[1, 1], [4, 4], [6, 6]]
    assert runner._get_spec_decode_draft_probs(metadata(drafts)) is None
    certain = runner_of(_Head(), "a", "b", "c")
    DraftSampler(certain, probabilistic=False)
    assert not hasattr(certain, "_get_spec_decode_draft_probs")


def test_a_head_of_another_vocabulary_is_an_error() -> None:
    model = SimpleNamespace(compute_logits=lambda hidden: hidden)
    runner = runner_of(model, "a", "b", "c")
    drafts = drawn(runner, FINAL, 1.0, 1.0, 1.0)
    with pytest.raises(RunError, match="draws from 3 tokens; allowed: the target's 8"):
        runner._get_spec_decode_draft_probs(metadata(drafts))

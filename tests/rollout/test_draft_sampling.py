"""What a drawn draft is verified with, where the head's distribution is known, not known any more, or not a number."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_tlt.errors import RunError
from megatron_tlt.rollout.vllm_draft_sampling import DraftedRow, DraftSampler, DraftsEnded

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
    return SimpleNamespace(drafter=SimpleNamespace(model=model), input_batch=batch, device=torch.device("cpu"))


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


class _Proposer:
    """Drafts as vLLM's does: a state (requests, 3) for each depth, until nobody takes more."""

    def __init__(self, sampler: DraftSampler, proposer: Any) -> None:
        self.sampler, self.proposer = sampler, proposer

    def drafts(self, depths: list[torch.Tensor], found: list[DraftedRow], least: float) -> tuple[list[list[int]], int]:
        """Each request's drafts, and how many depths were asked for."""
        self.sampler.begin(found, least)
        asked = 0
        with contextlib.suppress(DraftsEnded):
            for hidden in depths:
                asked += 1
                self.proposer._sample_draft_tokens(hidden, None)
        return self.sampler.end(), asked


@pytest.mark.parametrize("probabilistic", [False, True])
def test_drafts_end_where_they_become_unlikely_before_one_is_drawn(probabilistic: bool) -> None:
    runner = runner_of(_Head(), "a", "b", "c")
    proposer = _Proposer(DraftSampler(runner, probabilistic), runner.drafter)
    sure = torch.tensor([[2.0, 0.0, 0.0], [0.0, 2.0, 0.0], [0.0, 0.0, 0.1]])  # 0.96, 0.96, 0.38
    depths = [sure, sure[[0, 2, 0]], sure, sure]
    found = [DraftedRow(name, 1.0, 11, 5, limit) for name, limit in zip("abc", (3, 4, 4), strict=True)]
    drafts, asked = proposer.drafts(depths, found, 0.9)
    # the first ends at 0.96 ** 3 = 0.89, the second at its second draft, the third at once though its next is sure
    assert [len(row) for row in drafts] == [2, 1, 0] and asked == 3
    if probabilistic:  # what waits is of these drafts, by request, in whatever order they are verified
        runner.input_batch.req_ids = ["c", "b", "a"]
        probs = runner._get_spec_decode_draft_probs(metadata([[], drafts[1], drafts[0]]))
        expected = (torch.stack([sure[1], sure[0], sure[0]]) * 2.0).softmax(-1)
        torch.testing.assert_close(probs[:, IDS], expected)
    assert [len(row) for row in proposer.drafts(depths, found, 0.8)[0]] == [3, 1, 0]
    assert [len(row) for row in proposer.drafts(depths, found, 0.0)[0]] == [3, 4, 4]
    none = torch.full((3, 3), torch.nan)
    assert proposer.drafts([none, none], found, 0.5) == ([[], [], []], 1)


def test_the_bound_is_at_the_requests_temperature() -> None:
    runner = runner_of(_Head(), "a", "b", "c")
    proposer = _Proposer(DraftSampler(runner, False), runner.drafter)
    hidden = torch.tensor([[1.0, 0.0, 0.0]]).expand(3, 3)  # 0.79 at 1, 0.58 at 2, greedy as at 1
    drafts, _ = proposer.drafts([hidden], rows(1.0, 2.0, 0.0), 0.7)
    assert [len(row) for row in drafts] == [1, 0, 1]

"""A step's samples as ragged tensors: what is selected, split, put together and moved is what was there."""

from __future__ import annotations

import json
from array import array
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_tlt.data.exchange import plan_sends, redistribute
from megatron_tlt.data.rollout_batch import RESPONSE_COLUMNS, TOKENS, RolloutBatch
from megatron_tlt.errors import RunError
from tests.data.batches import known, random_batch, row
from tests.helpers.launch import run_torchrun

COUNTS = st.integers(0, 9)
NAMES = st.lists(st.sampled_from(sorted(RESPONSE_COLUMNS)), unique=True).map(tuple)


def test_a_column_belongs_to_the_response_and_a_view_costs_nothing() -> None:
    old = torch.tensor([-1.0, -2.0, -3.0])
    batch = RolloutBatch.of_sequences([(5, 6, 7, 8), array("i", (9, 4))], [2, 1], old_log_probs_G=old)
    assert batch.tokens(0).tolist() == [5, 6, 7, 8] and batch.response(TOKENS, 1).tolist() == [4]
    assert batch.response("old_log_probs_G", 0).tolist() == [-1, -2]
    assert batch.response("old_log_probs_G", 1).tolist() == [-3]
    assert batch.tokens(1).data_ptr() == batch.tokens_S[4:].data_ptr()
    assert batch.advantages_N.tolist() == [1, 1]
    with pytest.raises(KeyError):
        batch.holding([1]).tokens(0)
    with pytest.raises(KeyError):
        batch.response("token_weights_G", 0)


def test_what_contradicts_itself_is_refused() -> None:
    with pytest.raises(ValueError, match=r"old_log_probs_G has shape \(1,\) .*; allowed: \(2,\) of torch.float32"):
        RolloutBatch.of_sequences([(1, 2, 3)], [1], old_log_probs_G=torch.zeros(1))
    with pytest.raises(ValueError, match=r"old_log_probs_G has shape \(2,\) of torch.float64"):
        RolloutBatch.of_sequences([(1, 2, 3)], [1], old_log_probs_G=torch.zeros(2, dtype=torch.float64))
    for prompt in (0, 3):
        with pytest.raises(ValueError, match=f"sample 1: a prompt of {prompt} of 3 tokens"):
            RolloutBatch.of_sequences([(1, 2), (1, 2, 3)], [1, prompt])
    with pytest.raises(ValueError, match="allowed: each once"):
        random_batch(3).select([0, 0])
    with pytest.raises(ValueError, match="held samples"):
        random_batch(2).with_columns(held=(1, 0))  # type: ignore[arg-type]


@given(COUNTS, NAMES, st.data())
def test_selected_samples_are_the_same_in_the_order_asked_for(
    count: int, names: tuple[str, ...], data: st.DataObject
) -> None:
    batch = random_batch(count, 1, names)
    kept = data.draw(st.sets(st.integers(0, count - 1)) if count else st.just(set()))
    part = batch.holding(kept)
    order = data.draw(st.permutations(range(count)))[: data.draw(st.integers(0, count))]
    chosen = part.select(order)
    assert [known(chosen, at) for at in range(len(order))] == [known(batch, i) for i in order]
    assert [order[at] for at in chosen.held] == [i for i in order if i in kept]
    assert [row(chosen, at) for at in chosen.held] == [row(batch, i) for i in order if i in kept]


@given(st.integers(1, 5), st.integers(1, 12), st.data())
def test_each_rank_gets_what_it_lacks_once_from_a_holder(ranks: int, samples: int, data: st.DataObject) -> None:
    bits = st.lists(st.lists(st.booleans(), min_size=samples, max_size=samples), min_size=ranks, max_size=ranks)
    held, wanted = torch.tensor(data.draw(bits)), torch.tensor(data.draw(bits))
    if (wanted.any(dim=0) & ~held.any(dim=0)).any():
        with pytest.raises(RunError, match="no rank holds its tokens"):
            plan_sends(held, wanted)
        return
    sends = plan_sends(held, wanted)
    for destination in range(ranks):
        received = [i for row in sends for i in row[destination]]
        assert sorted(received) == (wanted & ~held)[destination].nonzero()[:, 0].tolist()
        assert not sends[destination][destination]
    assert all(held[source, i] for source, row in enumerate(sends) for part in row for i in part)
    assert all(part == sorted(part) for row in sends for part in row)


def test_holders_of_the_same_samples_share_the_sending() -> None:
    held = torch.tensor([[True] * 8, [True] * 8, [False] * 8])
    sends = plan_sends(held, ~held)
    assert (len(sends[0][2]), len(sends[1][2])) == (4, 4)


def test_one_process_drops_what_it_no_longer_wants() -> None:
    batch = random_batch(4, columns=("rollout_log_probs_G", "old_log_probs_G"))
    found = redistribute(batch, [1, 3], ["old_log_probs_G"])
    assert found.held == (1, 3) and list(found.columns) == ["old_log_probs_G"]
    assert found.response("old_log_probs_G", 3).tolist() == batch.response("old_log_probs_G", 3).tolist()


@pytest.mark.distributed
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_exchange_samples(world: int, tmp_path: Path) -> None:
    worker = Path(__file__).parent / "workers" / "exchange.py"
    run_torchrun(worker, world, [str(tmp_path)], timeout_s=120)
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(world)]
    assert all(rank["wrong"] == [] and rank["rounds"] == 20 for rank in ranks), ranks
    assert len({rank["missing"] for rank in ranks}) == 1 and "no rank holds its tokens" in ranks[0]["missing"]
    assert all("different columns" in rank["differ"] for rank in ranks)

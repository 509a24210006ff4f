"""Samples as padded tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_tlt.actor.batches import BatchShape, collate, form_micro_batches, pack, plan_shares
from megatron_tlt.actor.context import context_positions
from megatron_tlt.data.rollout_batch import RolloutBatch
from tests.helpers.samples import Sample, batch_of

CPU = torch.device("cpu")


def test_columns_stand_at_the_positions_that_predict_the_response() -> None:
    sample = Sample((5, 6, 7, 8), 2, advantage=3.0, old_log_probs=(-1.0, -2.0))
    batch = collate(batch_of([sample]), [0], pad_to_multiple=4, device=CPU)
    assert batch.tokens_RT.tolist() == [[5, 6, 7, 8]]
    assert batch.labels_RT.tolist() == [[6, 7, 8, 0]]
    assert batch.loss_inputs.mask_BT.tolist() == [[0, 1, 1, 0]]
    assert batch.loss_inputs.advantages_BT.tolist() == [[0, 3, 3, 0]]
    assert batch.loss_inputs.old_log_probs_BT.tolist() == [[0, -1, -2, 0]]
    assert batch.response_values(batch.labels_RT).tolist() == [7, 8]


@given(
    st.lists(st.integers(2, 20), min_size=1, max_size=30),
    st.integers(1, 4),
    st.builds(
        BatchShape,
        max_tokens=st.just(20),
        packed=st.booleans(),
        count_multiple_of=st.integers(1, 3),
        equal_counts=st.booleans(),
        sequence_parallel_size=st.integers(1, 3),
        context_parallel_size=st.integers(1, 3),
    ),
)
def test_shares_hold_everything_once_and_rows_divide(lengths: list[int], ranks: int, shape: BatchShape) -> None:
    shares = plan_shares(lengths, shape, ranks)
    assert sorted(i for groups in shares for group in groups for i in group) == list(range(len(lengths)))
    assert all(groups and len(groups) % shape.count_multiple_of == 0 for groups in shares)
    assert not shape.equal_counts or len({len(groups) for groups in shares}) == 1
    samples = [Sample(tuple(range(n)), 1) for n in lengths]
    formed = form_micro_batches(batch_of(samples), shares[0], shape, CPU)
    assert len(formed) == len(shares[0]) and formed[0].indices == tuple(shares[0][0])
    for batch in formed:
        width = batch.tokens_RT.shape[1]
        assert width % shape.sequence_parallel_size == 0
        held = [batch.on_context_rank(r, shape.context_parallel_size) for r in range(shape.context_parallel_size)]
        assert sum(part.tokens_RT.shape[1] for part in held) == width
        rows = batch.by_sample(batch.labels_RT)
        assert rows.shape == batch.loss_inputs.mask_BT.shape
        for row, (start, stop), i in zip(rows, batch.response_spans, batch.indices, strict=True):
            assert row[start:stop].tolist() == list(samples[i].token_ids[1:])


def test_context_ranks_hold_both_ends_of_each_sequence() -> None:
    ends = (0, 8, 12)
    assert context_positions(ends, 0, 2) == [0, 1, 6, 7, 8, 11]
    assert context_positions(ends, 1, 2) == [2, 3, 4, 5, 9, 10]
    with pytest.raises(ValueError, match="6 tokens; allowed: a multiple of 4"):
        context_positions((0, 6), 0, 2)


def test_a_pack_has_each_sequence_with_positions_of_its_own_and_the_columns_of_the_padded_form() -> None:
    samples = [
        Sample((5, 6, 7, 8), 2, advantage=3.0, old_log_probs=(-1.0, -2.0)),
        Sample((9, 4), 1, advantage=-1.0, old_log_probs=(-3.0,)),
    ]
    batch = pack(batch_of(samples), [0, 1], pad_to_multiple=8, device=CPU)
    assert batch.tokens_RT.tolist() == [[5, 6, 7, 9, 0, 0, 0, 0]]
    assert batch.labels_RT.tolist() == [[6, 7, 8, 4, 0, 0, 0, 0]]
    assert batch.positions_RT.tolist() == [[0, 1, 2, 0, 0, 1, 2, 3]]
    assert batch.cu_seqlens == (0, 3, 4, 8)
    assert batch.loss_inputs.mask_BT.tolist() == [[0, 1, 1], [1, 0, 0]]
    assert batch.loss_inputs.old_log_probs_BT.tolist() == [[0, -1, -2], [-3, 0, 0]]
    assert batch.response_values(batch.by_sample(batch.labels_RT)).tolist() == [7, 8, 4]


def test_a_mask_leaves_tokens_out_of_the_loss_and_a_part_is_formed_of_what_is_held() -> None:
    columns = {"loss_mask_G": torch.tensor([True, False, True]), "token_weights_G": torch.tensor([0.5, 1.0, 2.0])}
    whole = RolloutBatch.of_sequences([(5, 6, 7, 8), (9, 4)], [2, 1], **columns)
    inputs = pack(whole, [0, 1], pad_to_multiple=1, device=CPU).loss_inputs
    assert inputs.mask_BT.tolist() == [[0, 1, 0], [1, 0, 0]]
    assert inputs.token_weights_BT.tolist() == [[1, 0.5, 1], [2, 1, 1]]
    held = whole.holding([1])
    assert pack(held, [1], pad_to_multiple=1, device=CPU).loss_inputs.mask_BT.tolist() == [[1]]
    with pytest.raises(KeyError):
        pack(held, [0], pad_to_multiple=1, device=CPU)

"""Samples as padded tensors."""

from __future__ import annotations

import pytest
import torch

from megatron_tlt.actor.batches import collate, micro_batches, pack
from megatron_tlt.algorithms.types import TrainingSample

CPU = torch.device("cpu")


def test_columns_stand_at_the_positions_that_predict_the_response() -> None:
    sample = TrainingSample((5, 6, 7, 8), 2, advantage=3.0, old_log_probs=(-1.0, -2.0))
    batch = collate([sample], [0], pad_to_multiple=4, device=CPU)
    assert batch.tokens_RT.tolist() == [[5, 6, 7, 8]]
    assert batch.labels_RT.tolist() == [[6, 7, 8, 0]]
    assert batch.loss_inputs.mask_BT.tolist() == [[0, 1, 1, 0]]
    assert batch.loss_inputs.advantages_BT.tolist() == [[0, 3, 3, 0]]
    assert batch.loss_inputs.old_log_probs_BT.tolist() == [[0, -1, -2, 0]]
    assert batch.response_rows(batch.labels_RT) == [(7.0, 8.0)]


@pytest.mark.parametrize("packed", [False, True])
def test_every_sample_is_in_one_micro_batch_within_the_bound(packed: bool) -> None:
    samples = [TrainingSample(tuple(range(n)), 1) for n in (3, 9, 4, 20, 5, 5)]
    batches = micro_batches(samples, max_tokens=20, pad_to_multiple=1, device=CPU, packed=packed)
    assert sorted(i for batch in batches for i in batch.indices) == list(range(6))
    assert all(batch.tokens_RT.numel() <= 20 for batch in batches)


def test_a_pack_has_each_sequence_with_positions_of_its_own_and_the_columns_of_the_padded_form() -> None:
    samples = [
        TrainingSample((5, 6, 7, 8), 2, advantage=3.0, old_log_probs=(-1.0, -2.0)),
        TrainingSample((9, 4), 1, advantage=-1.0, old_log_probs=(-3.0,)),
    ]
    batch = pack(samples, [0, 1], pad_to_multiple=8, device=CPU)
    assert batch.tokens_RT.tolist() == [[5, 6, 7, 9, 0, 0, 0, 0]]
    assert batch.labels_RT.tolist() == [[6, 7, 8, 4, 0, 0, 0, 0]]
    assert batch.positions_RT.tolist() == [[0, 1, 2, 0, 0, 1, 2, 3]]
    assert batch.cu_seqlens == (0, 3, 4, 8)
    assert batch.loss_inputs.mask_BT.tolist() == [[0, 1, 1], [1, 0, 0]]
    assert batch.loss_inputs.old_log_probs_BT.tolist() == [[0, -1, -2], [-3, 0, 0]]
    assert batch.response_rows(batch.by_sample(batch.labels_RT)) == [(7.0, 8.0), (4.0,)]

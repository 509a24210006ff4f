"""Memory is freed and filled again behind views that stay views."""

from __future__ import annotations

import torch

from megatron_tlt.platform.offload import StorageOffload


def test_views_share_what_comes_back() -> None:
    whole = torch.arange(6.0)
    view, alone = whole[2:4], torch.ones(3, dtype=torch.bfloat16)
    memory = StorageOffload()
    assert memory.offload([view, whole, alone]) == 6 * 4 + 3 * 2
    assert whole.untyped_storage().nbytes() == 0 == alone.untyped_storage().nbytes()
    memory.reload()
    assert whole.tolist() == [0, 1, 2, 3, 4, 5] and alone.tolist() == [1, 1, 1]
    whole[2] = 9
    assert view.tolist() == [9, 3]


def test_what_is_not_kept_takes_no_host_memory_but_has_its_size_again() -> None:
    gradient = torch.ones(8)
    memory = StorageOffload()
    assert memory.offload([gradient], keep=False) == 32
    memory.reload()
    assert gradient.zero_().tolist() == [0] * 8
    assert memory.offload([torch.empty(0)]) == 0
    memory.reload()


def test_host_memory_is_taken_once_and_used_again() -> None:
    memory, tensors = StorageOffload(), [torch.arange(5.0), torch.arange(5.0, 10.0)]
    addresses = []
    for _ in range(3):
        memory.offload(tensors)
        addresses.append(sorted(host.data_ptr() for _, _, host in memory._held if host is not None))
        memory.reload()
        assert torch.cat(tensors).tolist() == list(map(float, range(10)))
    assert addresses[0] == addresses[1] == addresses[2]

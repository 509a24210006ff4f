"""Checksums of many tensors together, by few operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_tlt.reshard import checksum as module
from megatron_tlt.reshard.checksum import checksum, checksums
from megatron_tlt.reshard.packer import copy_each


def tensors() -> list[torch.Tensor]:
    """Shapes, dtypes and memory layouts of weights, in no order."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(64, 24, 8, generator=generator)
    experts = [whole[i, :, :6] for i in range(20)] + [whole[20 + i].T for i in range(20)]
    return [
        *experts[:15],
        torch.randn(7, generator=generator),
        *(expert.bfloat16() for expert in experts[:9]),
        *experts[15:],
        torch.tensor(3.0),
        torch.randn(5, 3, generator=generator).bfloat16(),
    ]


@pytest.mark.parametrize("stacked_bytes", [1, 2000, 64 << 20])
def test_together_they_are_those_of_each(stacked_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STACKED_BYTES", stacked_bytes)
    together = torch.stack(checksums(tensors()))
    assert torch.equal(together, torch.stack([checksum(tensor) for tensor in tensors()]))


def test_one_flipped_bit_changes_one_of_them() -> None:
    before, changed = torch.stack(checksums(tensors())), tensors()
    changed[11].view(torch.int32)[3, 2] ^= 1
    assert (torch.stack(checksums(changed)) != before).any(1).nonzero().tolist() == [[11]]


class _Count(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        views = ("view", "reshape", "detach", "slice", "select", "narrow", "alias", "unsqueeze", "unbind", "t.default")
        self.count += not any(name in str(function) for name in views)
        return function(*args, **(kwargs or {}))


def test_the_experts_of_a_layer_cost_few_operations() -> None:
    source = torch.randn(3 * 128, 12, 8, generator=torch.Generator().manual_seed(1))
    target = torch.zeros_like(source)
    with _Count() as counter:
        copy_each(list(source), list(target))
        assert torch.equal(torch.stack(checksums(list(source))), torch.stack(checksums(list(target))))
    assert torch.equal(source, target)
    assert counter.count < 40, f"{counter.count} operations for {len(source)} tensors"

"""Weights into a target, and the proof that they arrived."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_tlt.bench.export_sync import ExportSync
from megatron_tlt.errors import RunError
from megatron_tlt.reshard.checksum import checksum
from megatron_tlt.reshard.interface import HeldWeights, Part
from megatron_tlt.rollout.types import ShardSlice


class Memory:
    """A target in plain memory: bf16 copies, one of them a slice; ``damage`` names a tensor that arrives wrong."""

    def __init__(self, shapes: dict[str, torch.Tensor], part: ShardSlice, damage: str | None = None) -> None:
        self.held = {name: torch.zeros_like(t, dtype=torch.bfloat16) for name, t in shapes.items()}
        self.part = part
        self.damage = damage
        self.version: int | None = None
        self.held["b"] = self.held["b"].narrow(part.dim, part.start, part.length).clone()

    def begin_update(self, part: Part) -> None:
        self.version = None

    def finish_update(self, part: Part, version: int) -> None:
        self.version = version

    def load_weights(self, named: Iterable[tuple[str, torch.Tensor]]) -> int:
        count = 0
        for name, tensor in named:
            count += 1
            if name == self.damage or name not in self.held:
                continue
            part = self.part if name == "b" else None
            whole = tensor if part is None else tensor.narrow(part.dim, part.start, part.length)
            self.held[name].copy_(whole)
        return count

    def read_weights(self) -> HeldWeights:
        return [(name, tensor, self.part if name == "b" else None) for name, tensor in self.held.items()]

    read_drafter_weights = read_weights


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(6, 4, generator=generator) for name in "abc"}


def test_every_tensor_is_verified_in_the_targets_dtype_and_slice() -> None:
    source = weights()
    target = Memory(source, ShardSlice(0, 2, 3))
    report = ExportSync(lambda: iter(source.items()), target).sync(version=7, verify=True)
    assert (report.tensors, report.verified_tensors, report.version, target.version) == (3, 3, 7, 7)
    assert torch.equal(target.held["b"], source["b"][2:5].to(torch.bfloat16))


def test_a_stale_tensor_is_named() -> None:
    source = weights()
    target = Memory(source, ShardSlice(0, 2, 3), damage="c")
    with pytest.raises(RunError, match=r"c in the engine has checksum .* stale or damaged"):
        ExportSync(lambda: iter(source.items()), target).sync(version=1, verify=True)
    assert target.version is None
    assert ExportSync(lambda: iter(source.items()), target).sync(version=1, verify=False).verified_tensors == 0


def test_a_tensor_that_was_never_sent_is_named() -> None:
    source = weights()
    target = Memory(source, ShardSlice(0, 2, 3))
    with pytest.raises(RunError, match="a is in the engine, but the actor did not send it"):
        ExportSync(lambda: iter([(n, t) for n, t in source.items() if n != "a"]), target).sync(version=1, verify=True)


@given(st.integers(0, 2**31 - 1), st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
def test_checksum_sees_one_flipped_bit_and_one_swap(seed: int, dtype: torch.dtype) -> None:
    tensor = torch.randn(5, 7, generator=torch.Generator().manual_seed(seed)).to(dtype)
    found = checksum(tensor).tolist()
    assert checksum(tensor.t().contiguous().t()).tolist() == found
    flipped = tensor.clone()
    flipped.view(torch.uint8).reshape(-1)[seed % (5 * 7)] ^= 1
    assert checksum(flipped).tolist() != found
    swapped = tensor.clone()
    swapped[0, 0], swapped[4, 6] = tensor[4, 6], tensor[0, 0]
    if not torch.equal(swapped, tensor):
        assert checksum(swapped).tolist() != found

"""Compares packed rotary embeddings with Megatron-Core's own, and counts reads of tensors on the host."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_tlt.platform.device import initialize_distributed, prepare

prepare()

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding  # noqa: E402

from megatron_tlt.actor import megatron_rotary  # noqa: E402
from tests.helpers import put_back  # noqa: E402


class NoReads(TorchDispatchMode):
    """``item`` and ``tolist`` of a tensor are ``_local_scalar_dense`` in torch: on a GPU they wait for it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host reads a tensor"
        return func(*args, **(kwargs or {}))


class Ranks:
    """What both functions ask of a group."""

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = lambda: size, lambda: rank


def main() -> None:
    put_back.install_from_environment()
    initialize_distributed(60)
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    rotary = RotaryEmbedding(kv_channels=16, rotary_percent=1.0, use_cpu_initialization=True)
    whole = torch.distributed.group.WORLD
    for case in range(40):
        ranks = 1 + case % 2 * 2
        group: Any = Ranks(ranks, rng.randrange(ranks))
        lengths = [2 * ranks * rng.randint(1, 20) for _ in range(rng.randint(1, 6))]
        ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
        t = torch.randn(sum(lengths) // ranks, 3, 16, generator=generator)
        freqs = rotary(max(lengths), packed_seq=True, cp_group=whole)
        expected = megatron_rotary._library_function(t, ends, freqs, cp_group=group)
        with NoReads():
            found = megatron_rotary.apply_packed_rotary(t, ends, freqs, cp_group=group)
        assert torch.equal(found, expected), (ranks, group.rank(), lengths)
    try:
        with NoReads():
            megatron_rotary._library_function(t, ends, freqs, cp_group=group)
    except AssertionError as error:
        assert "the host reads a tensor" in str(error)
    else:
        raise AssertionError("the library's function has no reads any more: megatron_rotary is not needed")
    print("bits equal")


if __name__ == "__main__":
    main()

"""Views are made again when, and only when, parameters have other memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron_tlt.reshard.packer import copy_each
from megatron_tlt.reshard.views import ViewCache


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        flat = torch.arange(12.0)
        self.first = torch.nn.Parameter(flat[:8].view(4, 2))
        self.inner = torch.nn.Module()
        self.inner.second = torch.nn.Parameter(flat[8:])
        self.made = 0

    def views(self) -> Iterator[torch.Tensor]:
        self.made += 1
        for parameter in self.parameters():
            yield parameter.detach().narrow(0, 1, 2)


def prepare() -> tuple[Model, ViewCache[torch.Tensor]]:
    model = Model()
    return model, ViewCache[torch.Tensor]([model])


def test_views_are_kept_while_the_memory_is_the_same() -> None:
    model, cache = prepare()
    first = cache.get(model.views)
    with torch.no_grad():
        model.first.mul_(2)
    assert cache.get(model.views) is first
    assert model.made == 1
    assert first[0].tolist() == [[4.0, 6.0], [8.0, 10.0]]


def test_views_follow_a_storage_that_is_emptied_and_filled_again() -> None:
    model, cache = prepare()
    first = cache.get(model.views)
    storage = model.first.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    storage.resize_(size)
    with torch.no_grad():
        model.first.fill_(3.0)
        model.inner.second.fill_(4.0)
    again = cache.get(model.views)
    assert again is first
    assert [view.unique().tolist() for view in again] == [[3.0], [4.0]]


def test_other_memory_makes_other_views() -> None:
    model, cache = prepare()
    first = cache.get(model.views)
    model.inner.second.data = torch.full((4,), 7.0)
    second = cache.get(model.views)
    assert second is not first
    assert second[1].tolist() == [7.0, 7.0]
    model.inner.second.data = model.first.data.view(-1)[4:]  # the same storage, another place
    assert cache.get(model.views)[1].tolist() == [5.0, 6.0]
    model.inner.second = torch.nn.Parameter(torch.zeros(3))  # another parameter
    assert cache.get(model.views)[1].tolist() == [0.0, 0.0]


def test_copies_of_mixed_layouts() -> None:
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(6, 8, generator=generator)
    sources = [wide[:, :3], wide[2:4], torch.randn(5, generator=generator), wide.T]
    targets = [torch.zeros(6, 3), torch.zeros(2, 8), torch.zeros(5, dtype=torch.bfloat16), torch.zeros(6, 8).T]
    copy_each(sources, targets)
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(source.to(target.dtype), target)

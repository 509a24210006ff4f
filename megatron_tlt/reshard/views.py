"""Views of weights that are made once: making thousands of them takes longer than copying what they show."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

import torch

Item = TypeVar("Item")


class ViewCache(Generic[Item]):
    """Items that contain views of modules' parameters, kept while the parameters have the same memory.

    Parameters may be replaced; the modules stay the same.

    A storage that is emptied and filled again (an offload, or vLLM's sleep) is the same memory: views follow it. The
    views keep their storages alive, so that no other storage can be mistaken for one of them.
    """

    def __init__(self, roots: Sequence[torch.nn.Module]) -> None:
        self._owners = [module for root in roots for module in root.modules() if module._parameters]
        self._memory: list[tuple[int, int, torch.Size]] | None = None
        self._items: list[Item] | None = None

    def get(self, make: Callable[[], Iterable[Item]]) -> list[Item]:
        """The same list as before, or a new one of ``make``'s items if any parameter is other memory now."""
        parameters = (one for module in self._owners for one in module._parameters.values() if one is not None)
        memory = [(one.untyped_storage()._cdata, int(one.storage_offset()), one.shape) for one in parameters]
        if self._items is None or memory != self._memory:
            self._items = list(make())
            self._memory = memory
        return self._items

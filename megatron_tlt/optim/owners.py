"""Which rank owns, and therefore steps, which tensor; pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod


def assign_owners(shapes: Mapping[str, tuple[int, ...]], world: int, together: Iterable[str] = ()) -> dict[str, int]:
    """The owner of each tensor: the longest first, each to the rank with the fewest weights so far.

    Graham's longest-processing-time rule: no rank has more than 4/3 of the best possible maximum. The tensors of
    ``together`` all go to rank 0, before the others are assigned.
    """
    coupled = set(together)
    loads = [0] * world
    owners: dict[str, int] = {}
    for name, shape in shapes.items():
        if name in coupled:
            owners[name] = 0
            loads[0] += prod(shape)
    order = {name: at for at, name in enumerate(shapes)}
    for name in sorted(shapes.keys() - coupled, key=lambda name: (-prod(shapes[name]), order[name])):
        owner = min(range(world), key=lambda rank: (loads[rank], rank))
        owners[name] = owner
        loads[owner] += prod(shapes[name])
    return owners

"""An optimizer's state as named leaves, whatever containers the class keeps it in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

Leaf = torch.Tensor | float | int | bool | str | None

_EMPTY: dict[str, Any] = {"[]": list, "()": tuple, "{}": dict}


def is_plain(value: Any) -> bool:
    """Whether a value is None, a number or a text."""
    return value is None or isinstance(value, float | int | str)


def without_decay(options: dict[str, Any]) -> dict[str, Any]:
    """Saved options that a class may have changed in its steps.

    Weight decay is the config's, as that of the schedule is: classes were once built with the decay of matrices, from
    which they may have derived that of vectors (PyLO's ``adam_weight_decay``).
    """
    return {key: value for key, value in options.items() if not key.endswith("weight_decay")}


def flatten(state: Mapping[str, Any]) -> dict[str, Leaf]:
    """The leaves of nested dictionaries, lists and tuples, by path: ``Q/[0]`` is the first entry of the list ``Q``.

    Raises:
        TypeError: an entry is neither of these nor a tensor, a number, a text or None, or a key is not a text without
            a slash; names it.
    """
    if slashed := next((name for name in state if "/" in name), None):
        raise TypeError(f"{slashed!r}, whose name has a slash")
    return {path: leaf for name, value in state.items() for path, leaf in _leaves(name, value)}


def _leaves(path: Any, value: Any) -> Iterator[tuple[str, Leaf]]:
    name = path if isinstance(path, str) else repr(path)
    if name != path:
        raise TypeError(f"key {name}, which is not a text")
    if isinstance(value, torch.Tensor) or is_plain(value):
        yield name, value
        return
    for empty, kind in _EMPTY.items():
        if type(value) is not kind:
            continue
        if not value:
            yield f"{name}/{empty}", None
        entries = value.items() if kind is dict else enumerate(value)
        for key, entry in entries:
            step = key if kind is dict else f"{empty[0]}{key}{empty[1]}"
            if not isinstance(step, str) or (kind is dict and "/" in step):
                raise TypeError(f"{name!r}: key {key!r}, which is not a text without a slash")
            yield from _leaves(f"{name}/{step}", entry)
        return
    raise TypeError(f"{name!r} ({type(value).__name__})")


def unflatten(leaves: Mapping[str, Leaf]) -> dict[str, Any]:
    """The inverse of :func:`flatten`."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, last = path.split("/")
        node = tree
        for step in parents:
            node = node.setdefault(step, {})
        node[last] = leaf
    return {name: _contained(node) for name, node in tree.items()}


def _contained(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    first = next(iter(node))
    if first in _EMPTY:
        return _EMPTY[first]()
    entries = {step: _contained(entry) for step, entry in node.items()}
    for brackets, kind in _EMPTY.items():
        if kind is not dict and first[0] + first[-1] == brackets and first[1:-1].isdecimal():
            return kind(entries[f"{brackets[0]}{i}{brackets[1]}"] for i in range(len(entries)))
    return entries

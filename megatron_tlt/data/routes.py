"""The experts of tokens as bytes: what an engine chose, in the form in which it moves to the actor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from megatron_tlt.platform.collectives import all_gather_data
from megatron_tlt.rollout.types import Response


@dataclass(frozen=True)
class Routes:
    """The experts of tokens.

    Args:
        ids_TLK: expert numbers, int64; experts 0 to K - 1 for tokens that have none.
        is_known_T: which tokens have experts.
        weights_TLK: how much each counts, float32; None where weights are not recorded.
    """

    ids_TLK: torch.Tensor
    is_known_T: torch.Tensor
    weights_TLK: torch.Tensor | None


@dataclass(frozen=True)
class RouteFormat:
    """``layers`` x ``top_k`` experts per token; below 255 ``experts`` take one byte each, otherwise two.

    The highest number of a width means that a token has no recorded experts. Weights follow in float16, whose error is
    an eighth of bfloat16's.
    """

    layers: int
    top_k: int
    experts: int

    @property
    def _dtype(self) -> torch.dtype:
        return torch.uint8 if self.experts < 255 else torch.uint16

    @property
    def width(self) -> int:
        """Bytes per token without weights."""
        return self.layers * self.top_k * self._dtype.itemsize

    def encode(self, ids_TLK: torch.Tensor, weights_TLK: torch.Tensor | None = None) -> torch.Tensor:
        """Bytes (T, F) of expert numbers (any integer type) and their weights (any floating type)."""
        found = [ids_TLK.to(self._dtype)] + ([] if weights_TLK is None else [weights_TLK.to(torch.float16)])
        return torch.cat([one.contiguous().view(torch.uint8).reshape(len(one), -1) for one in found], dim=1)

    def decode(self, bytes_TF: torch.Tensor) -> Routes:
        """What ``encode`` was given; tokens whose bytes are all 255 have no experts."""
        shape = (len(bytes_TF), self.layers, self.top_k)
        ids = bytes_TF[:, : self.width].contiguous().view(self._dtype).view(shape).to(torch.int64)
        is_known = (ids != torch.iinfo(self._dtype).max).flatten(1).any(dim=1)
        ids = torch.where(is_known[:, None, None], ids, torch.arange(self.top_k, device=ids.device))
        if bytes_TF.shape[1] == self.width:
            return Routes(ids, is_known, None)
        weights = bytes_TF[:, self.width :].contiguous().view(torch.float16).view(shape)
        return Routes(ids, is_known, weights.float())


def routes_of(held: Iterable[Response]) -> torch.Tensor:
    """The experts of all tokens of this rank's responses, one behind another; the last token of each has none."""
    parts = []
    for one in held:
        assert one.routes is not None
        parts += [one.routes, torch.full((1, one.routes.shape[1]), 255, dtype=torch.uint8)]
    width = max(all_gather_data(parts[0].shape[1] if parts else 0, int))
    return torch.cat(parts) if parts else torch.empty((0, width), dtype=torch.uint8)

"""Random samples of unequal lengths."""

from __future__ import annotations

import torch

from tests.helpers.samples import Sample


def samples(vocabulary: int, count: int = 8) -> list[Sample]:
    """Token ids and advantages; about the second half of each sample is its response."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for index in range(count):
        length = 7 + 5 * index % 13
        tokens = torch.randint(vocabulary, (length,), generator=generator).tolist()
        advantage = float(torch.randn((), generator=generator))
        found.append(Sample(tuple(tokens), length // 2, advantage))
    return found

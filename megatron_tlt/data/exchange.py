"""Moves the samples of a batch between ranks: each rank says which it wants, and gets those that it lacks, once.

Shapes as in ``data/rollout_batch.py``; W ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from megatron_tlt.data.rollout_batch import RESPONSE_COLUMNS, ROUTES, TOKENS, RolloutBatch
from megatron_tlt.errors import RunError
from megatron_tlt.platform.collectives import Members

Sends = list[list[list[int]]]
"""``sends[source][destination]``: samples in ascending order."""


def plan_sends(held_WN: torch.Tensor, wanted_WN: torch.Tensor) -> Sends:
    """Who sends which sample to whom; pure. A rank gets what it wants and does not hold, from one that holds it.

    Both tables are bool. Of several holders of a sample, destinations take them in turn. Raises RunError if a sample is
    wanted that no rank holds.
    """
    ranks, samples = held_WN.shape
    sends: Sends = [[[] for _ in range(ranks)] for _ in range(ranks)]
    missing_WN = wanted_WN & ~held_WN
    for sample in missing_WN.any(dim=0).nonzero()[:, 0].tolist():
        holders = held_WN[:, sample].nonzero()[:, 0].tolist()
        if not holders:
            raise RunError(f"sample {sample} of {samples}: no rank holds its tokens")
        for at, destination in enumerate(missing_WN[:, sample].nonzero()[:, 0].tolist()):
            sends[holders[(sample + at) % len(holders)]][destination].append(sample)
    return sends


def redistribute(
    batch: RolloutBatch,
    wanted: Collection[int],
    columns: Sequence[str] | None = None,
    group: dist.ProcessGroup | None = None,
) -> RolloutBatch:
    """The batch holding the samples ``wanted``; every rank calls this with its own. What it holds does not travel.

    The batch has the same samples on every rank, and on one rank at least the tokens of each wanted one. ``columns``
    are those per response token that are still needed; None: all that there are. ``routes_SF`` is on all ranks or on
    none. The ranks are those of ``group``, of gloo; None is the world.

    Raises:
        RunError: on every rank: no rank holds a wanted sample, or holders of samples differ in their columns.
    """
    names = [name for name in batch.columns if columns is None or name in columns]
    dropped = {name: None for name in batch.columns if name not in names}
    batch = batch.with_columns(**dropped) if dropped else batch
    members = Members.of(group)
    if members.size == 1:
        return batch.holding(wanted)
    held_WN, wanted_WN, names = _requests(batch, wanted, names, members)
    batch = batch if batch.held else _with_empty(batch, names)
    sends = plan_sends(held_WN, wanted_WN)
    kept = [i for i in batch.held if wanted_WN[members.own, i]]
    if not any(samples for row in sends for samples in row):
        return batch.holding(kept)
    outgoing, incoming = sends[members.own], [row[members.own] for row in sends]
    arriving = [i for samples in incoming for i in samples]
    held = sorted((*kept, *arriving))
    moved: dict[str, torch.Tensor] = {}
    routes = [] if batch.routes_SF is None else [ROUTES]
    for name in (TOKENS, *routes, *names):  # one after another, so that only one column is in buffers
        length = batch.lengths.__getitem__ if name in (TOKENS, ROUTES) else batch.response_length
        found = _exchange(batch, name, outgoing, [sum(map(length, samples)) for samples in incoming], members)
        parts = dict(zip(arriving, found.split([length(i) for i in arriving]), strict=True))
        parts |= {i: _entries(batch, name, i) for i in kept}
        moved[name] = torch.cat([found[:0], *(parts[i] for i in held)])
    return replace(batch, held=tuple(held), **moved)


def _requests(
    batch: RolloutBatch, wanted: Collection[int], names: Sequence[str], members: Members
) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    """What every rank holds and wants, (W, N) each, and the columns that the holders have."""
    count = batch.num_samples
    mine = torch.zeros(2 * count + len(RESPONSE_COLUMNS), dtype=torch.uint8)
    mine[list(batch.held)] = 1
    mine[[count + i for i in wanted]] = 1
    mine[2 * count :] = torch.tensor([name in names for name in RESPONSE_COLUMNS])
    mine = mine.to(members.device)
    gathered = [torch.empty_like(mine) for _ in range(members.size)]
    dist.all_gather(gathered, mine, group=members.group)
    all_ranks = torch.stack(gathered).cpu().bool()
    held_WN, wanted_WN, has_WC = all_ranks.split([count, count, len(RESPONSE_COLUMNS)], dim=1)
    holders = held_WN.any(dim=1)
    if not holders.any():
        return held_WN, wanted_WN, []
    has_C = has_WC[holders][0]
    if (has_WC[holders] != has_C).any():
        raise RunError("ranks hold samples of one batch with different columns; allowed: the same on all")
    return held_WN, wanted_WN, [name for name, has in zip(RESPONSE_COLUMNS, has_C, strict=True) if has]


def _with_empty(batch: RolloutBatch, names: Sequence[str]) -> RolloutBatch:
    """A batch that holds nothing, with the columns that the others have."""
    empty = {name: torch.empty(0, dtype=dtype) if name in names else None for name, dtype in RESPONSE_COLUMNS.items()}
    return batch.with_columns(**empty)


def _entries(batch: RolloutBatch, name: str, sample: int) -> torch.Tensor:
    """A held sample's part of a column."""
    if name == ROUTES:
        return batch.routes(sample)
    return batch.tokens(sample) if name == TOKENS else batch.response(name, sample)


def _exchange(
    batch: RolloutBatch, name: str, outgoing: Sequence[Sequence[int]], receives: Sequence[int], members: Members
) -> torch.Tensor:
    """One column's entries from all ranks, one rank's behind another's; ``receives`` counts them by rank."""
    pieces = [[_entries(batch, name, i) for i in row] for row in outgoing]
    like = getattr(batch, name)
    data = torch.cat([like[:0], *(piece for row in pieces for piece in row)])
    if like.dtype == torch.bool:  # which neither gloo nor NCCL sends
        data = data.to(torch.uint8)
    data = data.to(members.device)
    found = data.new_empty((sum(receives), *data.shape[1:]))
    dist.all_to_all_single(found, data, list(receives), [sum(map(len, row)) for row in pieces], group=members.group)
    return found.cpu().to(like.dtype)

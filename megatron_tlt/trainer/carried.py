"""Responses that a step left unused, kept so that a later step continues them (partial rollouts).

A continued response has tokens of several policies. Each token keeps the log-prob under the policy that sampled it, and
that policy's version, which is the number of RL steps before it, so the loss can be corrected
(``algorithm.correction``).
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from pydantic import TypeAdapter

from megatron_tlt.data.exchange import redistribute
from megatron_tlt.data.rollout_batch import RolloutBatch
from megatron_tlt.errors import RunError
from megatron_tlt.platform.collectives import all_gather_data
from megatron_tlt.platform.device import rank, world_size
from megatron_tlt.rollout.types import Request, Response

Key = tuple[int, int]
"""Index of a problem or its position in a round, and number of its response."""
Versions = tuple[tuple[int, int], ...]
"""Runs of tokens: a policy's version, and how many tokens it sampled."""
UNFINISHED = "abort"
_ROWS, _TOKENS = "rows.json", "tokens.npz"


@dataclass(frozen=True)
class CarriedRow:
    """What every rank knows of a carried response."""

    problem: int
    sample: int
    prompt_length: int
    length: int
    finish_reason: str
    versions: Versions

    @property
    def key(self) -> Key:
        return self.problem, self.sample


@dataclass(frozen=True)
class Carried:
    """A carried response: its prompt, tokens so far, their log-probs and versions, and how it ended, if it has."""

    prompt_token_ids: tuple[int, ...]
    token_ids: array[int]
    log_probs: array[float]
    versions: Versions
    finish_reason: str


class CarriedResponses:
    """The carried responses of all ranks; a part of the checkpoint. Every rank knows all rows, and holds some tokens.

    Args:
        max_staleness: RL steps between a token and the step that trains on it, at most.
    """

    name = "carried"

    def __init__(self, max_staleness: int) -> None:
        self._max_staleness = max_staleness
        self.rows: list[CarriedRow] = []
        self.dropped_tokens = 0
        """Of responses that the last ``take`` dropped."""
        self._batch = _batch_of((), {})

    def add(self, left: Mapping[Key, Response], version: int) -> None:
        """Carry responses, by problem and sample; a collective. Those without tokens are left out.

        Args:
            left: this rank's; the tokens beyond their own ``versions`` are of ``version``.
            version: of the engine's policy.
        """
        own = {key: one for key, one in left.items() if len(one.token_ids)}
        mine = [
            CarriedRow(
                *key, len(one.prompt_token_ids), len(one.token_ids), one.finish_reason, whole_versions(one, version)
            )
            for key, one in own.items()
        ]
        new = sorted((row for rows in all_gather_data(mine, list[CarriedRow]) for row in rows), key=lambda row: row.key)
        self.rows = [*self.rows, *new]
        self._batch = RolloutBatch.concatenate([self._batch, _batch_of(new, own)])

    def due(self, version: int) -> set[int]:
        """Problems with a response that the step at ``version`` can continue, and no later one."""
        return {row.problem for row in self.rows if version - row.versions[0][0] == self._max_staleness}

    def take(self, problems: Collection[int], wanted: Collection[int], version: int) -> dict[Key, Carried]:
        """Remove the responses to ``problems`` and return those to ``wanted`` ones; a collective.

        Responses with a token that would be older than ``max_staleness`` steps at ``version`` are dropped: all later
        tokens depend on it.

        Args:
            problems: indices; the same on all ranks.
            wanted: those whose responses this rank needs.
            version: of the policy that continues them.
        """
        mine = [i for i, row in enumerate(self.rows) if row.problem in problems]
        rest = [i for i, row in enumerate(self.rows) if row.problem not in problems]
        taken = [i for i in mine if version - self.rows[i].versions[0][0] <= self._max_staleness]
        self.dropped_tokens = sum(self.rows[i].length for i in mine) - sum(self.rows[i].length for i in taken)
        rows, batch = [self.rows[i] for i in taken], self._batch.select(taken)
        self.rows, self._batch = [self.rows[i] for i in rest], self._batch.select(rest)
        if not rows:
            return {}
        batch = redistribute(batch, [i for i, row in enumerate(rows) if row.problem in wanted])
        return {rows[i].key: _carried(rows[i], batch, i) for i in batch.held}

    @contextmanager
    def unless_interrupted(self) -> Iterator[None]:
        """Put back what was taken within the context if it is left by an exception: a stopped step is repeated."""
        before = self.rows, self._batch
        try:
            yield
        except BaseException:
            self.rows, self._batch = before
            raise

    def save(self, folder: Path) -> None:
        """Write this rank's responses."""
        held = [self.rows[i] for i in self._batch.held]
        (folder / _ROWS).write_bytes(_ADAPTER.dump_json(held))
        columns = self._batch.columns
        np.savez(
            folder / _TOKENS,
            tokens=self._batch.tokens_S.numpy(),
            log_probs=columns.get("rollout_log_probs_G", torch.empty(0)).numpy(),
        )

    def load(self, folders: Sequence[Path]) -> None:
        """Restore all rows; the folders' tokens are shared out over the ranks of this run.

        Raises:
            RunError: a file cannot be read, or has other tokens than its rows say.
        """
        rows: list[CarriedRow] = []
        own: dict[Key, Response] = {}
        for number, folder in enumerate(folders):
            try:
                found = _ADAPTER.validate_json((folder / _ROWS).read_bytes())
                rows += found
                if number % world_size() == rank():
                    own |= _read_tokens(folder / _TOKENS, found)
            except (OSError, ValueError, KeyError) as error:
                raise RunError(f"{folder}: carried responses cannot be read: {error}") from error
        self.rows = sorted(rows, key=lambda row: row.key)
        self._batch = _batch_of(self.rows, own)


_ADAPTER = TypeAdapter(list[CarriedRow])


def whole_versions(response: Response, version: int) -> Versions:
    """The runs of all tokens of a response whose last tokens are of ``version``."""
    new = new_tokens(response)
    return (*response.versions, *(((version, new),) if new else ()))


def new_tokens(response: Response) -> int:
    """Tokens of a response that the engine's policy sampled."""
    return len(response.token_ids) - sum(count for _, count in response.versions)


def _batch_of(rows: Sequence[CarriedRow], own: Mapping[Key, Response]) -> RolloutBatch:
    held = [(i, own[row.key]) for i, row in enumerate(rows) if row.key in own]
    tokens = [np.asarray(ids, np.int32) for _, one in held for ids in (one.prompt_token_ids, one.token_ids)]
    log_probs = [np.asarray(one.log_probs, np.float32) for _, one in held]
    return RolloutBatch(
        prompt_lengths_N=torch.tensor([row.prompt_length for row in rows], dtype=torch.int64),
        lengths_N=torch.tensor([row.prompt_length + row.length for row in rows], dtype=torch.int64),
        rewards_N=torch.zeros(len(rows), dtype=torch.float64),
        advantages_N=torch.zeros(len(rows), dtype=torch.float64),
        versions_N=torch.tensor([row.versions[-1][0] for row in rows], dtype=torch.int64),
        held=tuple(i for i, _ in held),
        tokens_S=torch.from_numpy(np.concatenate([np.empty(0, np.int32), *tokens])),
        rollout_log_probs_G=torch.from_numpy(np.concatenate([np.empty(0, np.float32), *log_probs])),
    )


def _carried(row: CarriedRow, batch: RolloutBatch, sample: int) -> Carried:
    tokens = batch.response("tokens_S", sample).numpy().astype(np.int32)
    log_probs = batch.response("rollout_log_probs_G", sample).numpy().astype(np.float32)
    prompt = tuple(batch.tokens(sample)[: row.prompt_length].tolist())
    return Carried(
        prompt, array("i", tokens.tobytes()), array("f", log_probs.tobytes()), row.versions, row.finish_reason
    )


def _read_tokens(path: Path, rows: Iterable[CarriedRow]) -> dict[Key, Response]:
    with np.load(path, allow_pickle=False) as file:
        tokens, log_probs = file["tokens"], file["log_probs"]
    found, at, generated = {}, 0, 0
    for row in rows:
        prompt, end = at + row.prompt_length, at + row.prompt_length + row.length
        found[row.key] = Response(
            f"{row.problem}-{row.sample}",
            tuple(tokens[at:prompt].tolist()),
            array("i", tokens[prompt:end].astype(np.int32).tobytes()),
            array("f", log_probs[generated : generated + row.length].astype(np.float32).tobytes()),
            row.finish_reason,
            0.0,
        )
        at, generated = end, generated + row.length
    if (at, generated) != (len(tokens), len(log_probs)):
        raise ValueError(
            f"{path.name} has {len(tokens)} tokens and {len(log_probs)} log-probs; allowed: {at}, {generated}"
        )
    return found


class Continuations:
    """Requests of one engine that continue carried responses.

    A response to another prompt is not continued: after a resume an index may be that of another problem.

    Args:
        carried: by position of the problem in the round, and sample.
        keys: the same by request id.
    """

    def __init__(self, carried: Mapping[Key, Carried], keys: Mapping[str, Key]) -> None:
        self._carried = {name: carried[key] for name, key in keys.items() if key in carried}
        self._prompts: dict[str, tuple[int, ...]] = {}

    def begin(self, requests: Sequence[Request]) -> tuple[list[Request], list[Response]]:
        """The requests that an engine has to decode, and responses of the others, which have ended before."""
        left, ended = [], []
        for request in requests:
            before = self._carried.get(request.request_id)
            if before is not None and before.prompt_token_ids != request.prompt_token_ids:
                del self._carried[request.request_id]
                before = None
            if before is None:
                left.append(request)
                continue
            self._prompts[request.request_id] = request.prompt_token_ids
            sampling, length = request.sampling, len(before.token_ids)
            if before.finish_reason != UNFINISHED or length >= sampling.max_tokens:
                reason = "length" if before.finish_reason == UNFINISHED else before.finish_reason
                ended.append(self.join(Response(request.request_id, (), (), (), reason, 0.0)))
                continue
            shorter = replace(
                sampling, max_tokens=sampling.max_tokens - length, min_tokens=max(0, sampling.min_tokens - length)
            )
            prompt = (*request.prompt_token_ids, *before.token_ids)
            left.append(replace(request, prompt_token_ids=prompt, sampling=shorter, begun=length))
        return left, ended

    def join(self, response: Response) -> Response:
        """The whole response to a request that continued one; others are returned as they are."""
        before = self._carried.get(response.request_id)
        if before is None:
            return response
        return replace(
            response,
            prompt_token_ids=self._prompts[response.request_id],
            token_ids=before.token_ids + array("i", response.token_ids),
            log_probs=before.log_probs + array("f", response.log_probs),
            versions=before.versions,
        )

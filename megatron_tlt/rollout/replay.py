"""``rollout.engine: replay``: responses from a recording, for training, debugging and tests without an engine.

A recording is a JSON-lines file, or a folder of ``*.jsonl`` files, with one response per row. ``tlt rollout`` and, with
``observe.recording``, every training run write one:

- ``prompt_token_ids`` (list of P integers), ``sample`` (its number among the responses to a problem, from 0);
- ``token_ids`` (list of T integers, at least 1), ``log_probs`` (T numbers, each at most 0: the natural logarithm of
  the token's probability under the distribution that it was sampled from);
- ``finish_reason`` (optional, ``stop`` unless given) and ``seed`` (optional: that of the request it answered);
- of a task with an environment, optional: ``loss_mask`` (T times true or false; false: the environment's token),
  ``turns`` (their number) and ``reward`` (the environment's: ``value``, ``correct``, ``extracted``, ``error``).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_tlt.config.schema import RolloutConfig
from megatron_tlt.config.speculation import SpeculationConfig
from megatron_tlt.errors import ConfigError, RunError
from megatron_tlt.rewards.functions import as_reward
from megatron_tlt.rewards.types import Reward
from megatron_tlt.rollout.chooser import StrategyChooser
from megatron_tlt.rollout.interface import Capabilities, OnFinished, OnStep, RolloutEngine, TurnSource
from megatron_tlt.rollout.types import Request, Response
from megatron_tlt.speculation.strategy import OFF, StepRecord

_REQUIRED = ("prompt_token_ids", "sample", "token_ids", "log_probs")
_KEYS = (*_REQUIRED, "finish_reason", "seed", "loss_mask", "turns", "reward")
_FINISH_REASONS = ("stop", "length", "abort")
_MOST_PROBLEMS = 10
_ROUNDING = 1e-6
"""Tolerance by which a log-probability may exceed 0."""


@dataclass(frozen=True)
class RecordedAnswer:
    """A recorded response; ``seed`` is None if the row has none."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish_reason: str
    seed: int | None
    loss_mask: tuple[bool, ...] = ()
    turns: int = 1
    reward: Reward | None = None

    def response(self, request: Request, seconds: float) -> Response:
        """Convert to the answer to ``request``, truncated at the request's limit."""
        most = request.sampling.max_tokens
        reason = self.finish_reason if len(self.token_ids) <= most else "length"
        return Response(
            request.request_id,
            request.prompt_token_ids,
            self.token_ids[:most],
            self.log_probs[:most],
            reason,
            seconds,
            loss_mask=self.loss_mask[:most],
            turns=self.turns,
            reward=self.reward,
        )


class ReplayEngine(RolloutEngine):
    """Answers each request from the recording, by its prompt and sample number.

    Of several matching rows it takes the one with the request's seed, otherwise one selected by the seed.
    The same request thus always gets the same response, also in a resumed run. Responses do not follow the policy: the
    further the policy moves from the recorded one, the more ``algorithm.mismatch`` has to correct.

    Args:
        model_path: the folder with the policy's ``config.json``, for the vocabulary size.
        rollout: the config's section.
        speculation: the config's section; it is not enabled.
        seed: the run's; not used.
        path: path of the recording.

    Raises:
        ConfigError: the file cannot be read or has malformed rows; the message names the first ten.
    """

    capabilities = Capabilities(sleep=True, whole_episodes=True)  # it uses no device memory

    def __init__(
        self, model_path: Path, rollout: RolloutConfig, speculation: SpeculationConfig, seed: int, *, path: str
    ) -> None:
        model = json.loads((model_path / "config.json").read_text(encoding="utf-8"))
        self._path = Path(path)
        self._answers = read_recording(self._path, int(model["vocab_size"]))

    def generate(
        self,
        requests: Sequence[Request],
        on_finished: OnFinished | None = None,
        on_step: OnStep | None = None,
        chooser: StrategyChooser | None = None,
        turns: TurnSource | None = None,
    ) -> list[Response]:
        """See ``RolloutEngine.generate``; each response is an engine step of its own.

        Raises:
            ConfigError: the recording has no response to a request.
            RunError: a ``chooser`` or ``turns`` were given, but a replay neither drafts nor goes on.
        """
        if chooser is not None or turns is not None:
            raise self._lacks("speculation" if turns is None else "turns")
        answers = [self._answer(request) for request in requests]
        began = time.perf_counter()
        responses: list[Response] = []
        for request, answer in zip(requests, answers, strict=True):
            start = time.perf_counter() - began
            response = answer.response(request, start)
            responses.append(response)
            if on_step is not None:
                running, duration = len(requests) - len(responses) + 1, time.perf_counter() - began - start
                tokens = len(response.token_ids)
                on_step(StepRecord(OFF, running, duration, tokens, had_prefill=True, start=start))
            if on_finished is not None:
                on_finished(response)
        return responses

    def _answer(self, request: Request) -> RecordedAnswer:
        found = self._answers.get((request.prompt_token_ids, request.sample))
        if found is None:
            raise ConfigError(
                f"{self._path}: no response with sample {request.sample} to problem {request.problem_key!r}, whose "
                f"prompt has {len(request.prompt_token_ids)} tokens, {list(request.prompt_token_ids[:8])}...; needed: "
                "a row for each sample of each problem of the run"
            )
        return next((one for one in found if one.seed == request.seed), found[request.seed % len(found)])


Recording = dict[tuple[tuple[int, ...], int], list[RecordedAnswer]]
"""Answers by prompt token ids and sample number, in file order."""


def read_recording(path: Path, vocab_size: int) -> Recording:
    """Read the rows of a recording.

    Raises:
        ConfigError: it cannot be read, is empty, or has malformed rows; one line for each of the first ten.
    """
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    try:
        rows = [
            (f"{file}:{number}", line)
            for file in files
            for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1)
        ]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"rollout.engine_arguments.path: {path} cannot be read: {error}") from error
    answers: Recording = {}
    problems: list[str] = []
    for place, line in rows:
        try:
            row = _checked(json.loads(line), vocab_size)
        except ValueError as error:
            problems.append(f"{place}: {error}")
            continue
        key = tuple(row["prompt_token_ids"]), row["sample"]
        answer = RecordedAnswer(
            tuple(row["token_ids"]),
            tuple(row["log_probs"]),
            row.get("finish_reason", "stop"),
            row.get("seed"),
            tuple(row.get("loss_mask", ())),
            row.get("turns", 1),
            None if row.get("reward") is None else Reward(**row["reward"]),
        )
        answers.setdefault(key, []).append(answer)
    if not rows:
        problems.append(f"rollout.engine_arguments.path: {path} is empty; allowed: a row per response")
    if problems:
        raise ConfigError("\n".join(problems[:_MOST_PROBLEMS]))
    return answers


def _checked(row: Any, vocab_size: int) -> dict[str, Any]:
    """Check that a row has the documented form, and return it.

    Raises:
        ValueError: it does not.
    """
    if not isinstance(row, dict):
        raise ValueError(f"found a {type(row).__name__}; allowed: an object")
    for key in _REQUIRED:
        if key not in row:
            raise ValueError(f"no {key!r}; needed: {', '.join(_REQUIRED)}")
    if unknown := [key for key in row if key not in _KEYS]:
        raise ValueError(f"unknown key {unknown[0]!r}; allowed: {', '.join(_KEYS)}")
    for key in ("prompt_token_ids", "token_ids"):
        tokens = row[key]
        if (
            not isinstance(tokens, list)
            or not tokens
            or not all(type(t) is int and 0 <= t < vocab_size for t in tokens)
        ):
            raise ValueError(f"{key}: allowed: at least one token id, each from 0 to {vocab_size - 1}")
    values = row["log_probs"]
    numbers = isinstance(values, list) and all(type(v) in (int, float) and math.isfinite(v) for v in values)
    if not numbers or len(values) != len(row["token_ids"]) or max(values) > _ROUNDING:
        raise ValueError("log_probs: allowed: a number of at most 0 for each of token_ids")
    if type(row["sample"]) is not int or row["sample"] < 0:
        raise ValueError(f"sample: found {row['sample']!r}; allowed: 0 and more")
    if row.get("seed") is not None and type(row["seed"]) is not int:
        raise ValueError(f"seed: found {row['seed']!r}; allowed: a whole number")
    if row.get("finish_reason", "stop") not in _FINISH_REASONS:
        raise ValueError(f"finish_reason: found {row['finish_reason']!r}; allowed: {', '.join(_FINISH_REASONS)}")
    _check_episode(row)
    return row


def _check_episode(row: dict[str, Any]) -> None:
    mask, turns, reward = row.get("loss_mask", ()), row.get("turns", 1), row.get("reward")
    if "loss_mask" in row and not (
        isinstance(mask, list) and len(mask) == len(row["token_ids"]) and {type(one) for one in mask} == {bool}
    ):
        raise ValueError("loss_mask: allowed: true or false for each of token_ids")
    if type(turns) is not int or turns < 1:
        raise ValueError(f"turns: found {turns!r}; allowed: 1 and more")
    try:
        if reward is not None:
            as_reward({name: value for name, value in reward.items() if name not in ("error", "late")}, "reward")
            if not isinstance(reward.get("error"), str | None):
                raise TypeError(f"found the error {reward['error']!r}; allowed: text or null")
    except (TypeError, AttributeError) as error:
        raise ValueError(f"reward: {error}") from error


def append_recording(path: Path, requests: Iterable[Request], responses: Iterable[Response]) -> None:
    """Append rows that replay ``responses`` to their ``requests``, which are in the same order; creates the folder.

    Raises:
        RunError: the file cannot be written.
    """
    rows = [
        recording_row(
            request.prompt_token_ids,
            request.sample,
            response.token_ids,
            response.log_probs,
            response.finish_reason,
            seed=request.seed,
            loss_mask=response.loss_mask,
            turns=response.turns,
            reward=response.reward,
        )
        for request, response in zip(requests, responses, strict=True)
    ]
    append_rows(path, rows)


def recording_row(
    prompt_token_ids: Iterable[int],
    sample: int,
    token_ids: Iterable[int],
    log_probs: Iterable[float],
    finish_reason: str,
    *,
    seed: int | None = None,
    loss_mask: Sequence[bool] = (),
    turns: int = 1,
    reward: Reward | None = None,
) -> dict[str, Any]:
    """A response as a row of a recording; ``loss_mask`` and ``turns`` of a task with an environment."""
    return {
        "prompt_token_ids": list(prompt_token_ids),
        "sample": sample,
        "token_ids": list(token_ids),
        "log_probs": list(log_probs),
        "finish_reason": finish_reason,
        **({"seed": seed} if seed is not None else {}),
        **({"loss_mask": list(loss_mask), "turns": turns} if loss_mask else {}),
        **({"reward": asdict(reward)} if reward is not None else {}),
    }


def append_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append rows to a recording; creates the folder.

    Raises:
        RunError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))
    except OSError as error:
        raise RunError(f"{path}: cannot be written: {error}") from error

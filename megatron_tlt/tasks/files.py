"""Prompt files: JSONL and parquet, in verl's layout or with GSM8K's ``question`` and ``answer``.

verl's layout: ``prompt`` (text or a list of chat messages), ``reward_model.ground_truth``, optional ``data_source``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from megatron_tlt.errors import ConfigError
from megatron_tlt.tasks.marker import ANSWER_MARKER, worked_solution
from megatron_tlt.tasks.sizes import Params

T = TypeVar("T")

_SHOWN_BAD_ROWS = 10
_CALCULATOR = re.compile(r"<<[^<>]*>>")  # GSM8K's calculator annotations: 48/2 = <<48/2=24>>24


class FileParams(Params):
    """``params`` of a file task: text appended to every plain prompt; it does not decide the split."""

    prompt_suffix: str = ""


@dataclass(frozen=True)
class Row:
    """One valid row. ``number`` counts from 1: the line of a JSONL file, the row of a parquet file."""

    number: int
    prompt: str
    answer: str
    data_source: str | None = None
    messages: list[dict[str, str]] | None = None
    solution: str | None = None
    suffix: str = ""
    """The end of ``prompt`` that the task appended."""

    @property
    def split_text(self) -> str:
        """The text that decides the split: the prompt of the file, so that all tasks on it hold out the same rows."""
        return self.prompt.removesuffix(self.suffix)


class BadRow(Exception):
    """The reason why a row is invalid; the reader adds file and line."""


def read_rows(path: Path, params: FileParams) -> list[Row]:
    """Every row of a file; the two files read last are cached, because each split reads them.

    Raises:
        ConfigError: the file is missing, unreadable, empty or of an unknown kind, or has bad rows: names the first ten
            with file and line, and their count.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; a file task needs a .jsonl or .parquet file")
    stat = path.stat()
    return list(_read(path, params, stat.st_mtime_ns, stat.st_size))


@lru_cache(maxsize=2)  # a task's file and its held-out file
def _read(path: Path, params: FileParams, mtime_ns: int, size: int) -> list[Row]:
    return parse_rows(path, lambda number, row: _row(number, row, params))


def parse_rows(path: Path, parse: Callable[[int, dict[str, Any]], T]) -> list[T]:
    """What ``parse`` makes of each row and its number, counted from 1; it raises BadRow to refuse one.

    Raises:
        ConfigError: as :func:`read_rows`.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; allowed: a .jsonl or .parquet file")
    if path.suffix == ".jsonl":
        raw = _jsonl(path)
    elif path.suffix == ".parquet":
        raw = _parquet(path)
    else:
        raise ConfigError(f"{path}: unknown kind {path.suffix or '(no suffix)'}; allowed are .jsonl and .parquet")
    rows: list[T] = []
    bad: list[str] = []
    for number, value in raw:
        try:
            rows.append(parse(number, _object(value)))
        except BadRow as problem:
            bad.append(f"{path}:{number}: {problem}")
    if bad:
        more = f"\n{path}: {len(bad)} bad rows in all" if len(bad) > _SHOWN_BAD_ROWS else ""
        raise ConfigError("\n".join(bad[:_SHOWN_BAD_ROWS]) + more)
    if not rows:
        raise ConfigError(f"{path}: empty; it must hold at least one row")
    return rows


def _jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if line.strip():
            yield number, line


def _parquet(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        # An open file, because pyarrow looks for Hive partitions in the folder names of a path.
        with path.open("rb") as file:
            table = pyarrow.parquet.read_table(file)
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError(f"{path}: not a readable parquet file: {str(error).splitlines()[0]}") from error
    yield from enumerate(table.to_pylist(), start=1)


def _object(value: Any) -> dict[str, Any]:
    if isinstance(value, bytes):
        try:
            value = json.loads(value.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise BadRow(f"not UTF-8 at byte {error.start} of the line") from error
        except json.JSONDecodeError as error:
            raise BadRow(f"not JSON: {error.msg} at column {error.colno}") from error
        except RecursionError as error:
            raise BadRow("not usable JSON: nested too deeply") from error
    if not isinstance(value, dict):
        raise BadRow(f"a {type(value).__name__}; must be an object")
    return value


def _row(number: int, value: dict[str, Any], params: FileParams) -> Row:
    if value.get("prompt") is not None:
        return _verl_row(number, value, params)
    if value.get("question") is not None:
        return _question_row(number, value, params)
    found = ", ".join(sorted(map(str, value))) or "nothing"
    raise BadRow(f"no 'prompt' and no 'question' (found {found})")


def _verl_row(number: int, value: dict[str, Any], params: FileParams) -> Row:
    reward_model = value.get("reward_model")
    if not isinstance(reward_model, dict) or reward_model.get("ground_truth") is None:
        raise BadRow("no 'reward_model.ground_truth'")
    answer = _answer_text(reward_model["ground_truth"])
    source = value.get("data_source")
    if source is not None and not isinstance(source, str):
        raise BadRow(f"'data_source' is a {type(source).__name__}; must be text")
    prompt = value["prompt"]
    if isinstance(prompt, str):
        text = _plain_prompt("prompt", prompt, params)
        return Row(number, text, answer, data_source=source, suffix=params.prompt_suffix)
    messages = chat_messages("prompt", prompt)
    # Without a chat template the prompt is the concatenation of the messages' texts.
    text = "\n".join(message["content"] for message in messages)
    return Row(number, text, answer, data_source=source, messages=messages)


def _question_row(number: int, value: dict[str, Any], params: FileParams) -> Row:
    text = value.get("answer")
    if not isinstance(text, str) or not text.strip():
        raise BadRow("no 'answer' text")
    steps, marker, answer = text.rpartition(ANSWER_MARKER)
    answer = answer.strip()
    if not marker or not answer:
        raise BadRow(f"'answer' has no final answer after {ANSWER_MARKER}")
    lines = _CALCULATOR.sub("", steps).strip().splitlines()
    question = _plain_prompt("question", value["question"], params)
    return Row(number, question, answer, solution=worked_solution(lines, answer), suffix=params.prompt_suffix)


def _plain_prompt(key: str, text: Any, params: FileParams) -> str:
    if not isinstance(text, str) or not text.strip():
        raise BadRow(f"'{key}' is {'empty' if isinstance(text, str) else 'a ' + type(text).__name__}; must be text")
    return text + params.prompt_suffix


def _answer_text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise BadRow(f"'reward_model.ground_truth' is a {type(value).__name__}; must be text or a number")
    if not str(value).strip():
        raise BadRow("'reward_model.ground_truth' is empty")
    return str(value)


def chat_messages(key: str, value: Any) -> list[dict[str, str]]:
    """The chat messages under ``key`` of a row.

    Raises:
        BadRow: not a list of messages with text under ``role`` and ``content``, or all of them are empty.
    """
    if not isinstance(value, list) or not value:
        allowed = "must be text or messages" if key == "prompt" else "must be messages"
        raise BadRow(f"'{key}' is {'empty' if value == [] else 'a ' + type(value).__name__}; {allowed}")
    for position, message in enumerate(value):
        if not isinstance(message, dict) or not all(isinstance(message.get(name), str) for name in ("role", "content")):
            raise BadRow(f"{key}[{position}] must have text under 'role' and 'content'")
    if not any(message["content"].strip() for message in value):
        raise BadRow(f"'{key}' is empty")
    return [{"role": message["role"], "content": message["content"]} for message in value]

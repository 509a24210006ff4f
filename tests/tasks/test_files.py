"""Prompt files: both layouts, both kinds, and every way a row can be bad."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from megatron_tlt.errors import ConfigError
from megatron_tlt.tasks.files import FileParams, read_rows

GOOD = {"prompt": "1+1?", "reward_model": {"ground_truth": "2"}, "data_source": "sums"}


def _write(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_verl_jsonl(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+2?"}]
    path = _write(
        tmp_path / "p.jsonl", GOOD, "", {"prompt": chat, "reward_model": {"ground_truth": 4, "style": "rule"}}
    )
    first, second = read_rows(path, FileParams())
    assert (first.number, first.prompt, first.answer, first.data_source, first.messages) == (
        1,
        "1+1?",
        "2",
        "sums",
        None,
    )
    assert (second.number, second.prompt, second.answer, second.messages) == (3, "Add.\n2+2?", "4", chat)


def test_verl_parquet_equals_jsonl(tmp_path: Path) -> None:
    rows = [GOOD, {**GOOD, "prompt": "3+3?", "reward_model": {"ground_truth": "6"}}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "p.parquet")
    from_parquet = read_rows(tmp_path / "p.parquet", FileParams())
    assert from_parquet == read_rows(_write(tmp_path / "p.jsonl", *rows), FileParams())


def test_chat_parquet(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": "2+2?"}], "reward_model": {"ground_truth": "4"}}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "p.parquet")
    assert read_rows(tmp_path / "p.parquet", FileParams())[0].messages == rows[0]["prompt"]


def test_question_and_answer(tmp_path: Path) -> None:
    answer = "It is 48/2 = <<48/2=24>>24.\n#### 24"
    path = _write(tmp_path / "p.jsonl", {"question": "Half of 48?", "answer": answer})
    row = read_rows(path, FileParams(prompt_suffix="\n"))[0]
    assert (row.prompt, row.answer, row.solution) == ("Half of 48?\n", "24", "It is 48/2 = 24.\n#### 24")
    assert row.messages is None


def test_byte_order_mark_and_windows_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode() + b"\r\n\r\n")
    assert len(read_rows(path, FileParams())) == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"prompt": ', "not JSON: .* at column"),
        ("[1]", "a list; must be an object"),
        ("[" * 100_000, "not usable JSON: nested too deeply"),
        ({"text": "x"}, "no 'prompt' and no 'question' .found text"),
        ({"prompt": "x"}, "no 'reward_model.ground_truth'"),
        ({**GOOD, "reward_model": {"ground_truth": None}}, "no 'reward_model.ground_truth'"),
        ({**GOOD, "reward_model": {"ground_truth": " "}}, "'reward_model.ground_truth' is empty"),
        (
            {**GOOD, "reward_model": {"ground_truth": [1]}},
            "'reward_model.ground_truth' is a list; must be text or a number",
        ),
        ({**GOOD, "prompt": " "}, "'prompt' is empty"),
        ({**GOOD, "prompt": []}, "'prompt' is empty"),
        ({**GOOD, "prompt": 3}, "'prompt' is a int; must be text or messages"),
        ({**GOOD, "prompt": [{"role": "user"}]}, r"prompt\[0\] must have text under 'role' and 'content'"),
        ({**GOOD, "prompt": [{"role": "user", "content": ""}]}, "'prompt' is empty"),
        ({**GOOD, "data_source": 3}, "'data_source' is a int; must be text"),
        ({"question": "x", "answer": "no marker"}, "'answer' has no final answer after ####"),
        ({"question": "x", "answer": "#### "}, "'answer' has no final answer after ####"),
        ({"question": "x"}, "no 'answer' text"),
        ({"question": 5, "answer": "#### 1"}, "'question' is a int; must be text"),
    ],
)
def test_a_bad_row_is_reported_with_file_and_line(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"p\.jsonl:2: {message}"):
        read_rows(_write(tmp_path / "p.jsonl", GOOD, row, GOOD), FileParams())


def test_bytes_that_are_no_text_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b'\n{"prompt": "\xff"}\n')
    with pytest.raises(ConfigError, match=r"p\.jsonl:2: not UTF-8 at byte 12"):
        read_rows(path, FileParams())


def test_bad_parquet_rows_are_reported_by_row(tmp_path: Path) -> None:
    rows = [GOOD, {**GOOD, "prompt": ""}, {**GOOD, "reward_model": None}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "p.parquet")
    with pytest.raises(ConfigError) as caught:
        read_rows(tmp_path / "p.parquet", FileParams())
    lines = str(caught.value).splitlines()
    assert [line.split("p.parquet")[1][:3] for line in lines] == [":2:", ":3:"]


def test_the_first_ten_bad_rows_and_their_count(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_rows(_write(tmp_path / "p.jsonl", *[{"prompt": "x"}] * 25, GOOD), FileParams())
    lines = str(caught.value).splitlines()
    assert len(lines) == 11 and "p.jsonl:10:" in lines[9] and lines[10].endswith("25 bad rows in all")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.jsonl", b"", "empty; it must hold at least one row"),
        ("p.jsonl", b"\n \n", "empty; it must hold at least one row"),
        ("p.csv", b"a,b", r"unknown kind \.csv; allowed are \.jsonl and \.parquet"),
        ("p.parquet", b"not parquet", "not a readable parquet file"),
        ("p.jsonl", None, "no such file"),
    ],
)
def test_unusable_files(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_rows(tmp_path / name, FileParams())


def test_empty_parquet(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())}), tmp_path / "p.parquet")
    with pytest.raises(ConfigError, match="empty"):
        read_rows(tmp_path / "p.parquet", FileParams())

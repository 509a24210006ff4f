"""Conversations as supervised examples: what is read, what is trained on, in which order."""

from __future__ import annotations

import json
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from megatron_tlt.cli.preflight_tasks import check_tasks
from megatron_tlt.config.schema import TltConfig
from megatron_tlt.data.conversations import Conversation, ConversationData, encode_conversation, read_conversations
from megatron_tlt.data.tokenizer import Tokenizer, load_tokenizer
from megatron_tlt.errors import ConfigError
from megatron_tlt.models.recipe import recipe_folder
from tests.helpers.chat import TEMPLATE, chat_folder

USER, ANSWER = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
TALK = [{"role": "system", "content": "be short"}, USER, ANSWER, {"role": "user", "content": "sure?"}, ANSWER]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("chat") / "base")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


def talk(*messages: dict[str, str]) -> Conversation:
    return Conversation("talks.jsonl:7", messages)


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_every_answer_is_trained_on_with_its_end_and_nothing_else(tokenizer: Tokenizer) -> None:
    example = encode_conversation(tokenizer, talk(*TALK))
    runs = [
        (trained, tokenizer.decode([token for token, _ in run], special_tokens=True))
        for trained, run in groupby(zip(example.token_ids, example.loss_mask, strict=True), key=itemgetter(1))
    ]
    end = tokenizer.decode([tokenizer.eos_id], special_tokens=True)
    assert runs == [
        (0, "system:be short\nuser:2+2?\nassistant:"),
        (1, f"4{end}"),
        (0, "\nuser:sure?\nassistant:"),
        (1, f"4{end}"),
    ]


def test_an_answer_of_many_tokens_is_encoded_as_it_is_sampled(tokenizer: Tokenizer) -> None:
    long = {"role": "assistant", "content": "first 2, then 2 more, so 4"}
    example = encode_conversation(tokenizer, talk(USER, long))
    prompt = tokenizer.encode(tokenizer.chat_text([USER]))
    assert list(example.token_ids) == [*prompt, *tokenizer.encode(long["content"]), tokenizer.eos_id]
    assert list(example.loss_mask) == [0] * len(prompt) + [1] * (len(example) - len(prompt))


def test_a_template_without_an_end_gets_one_at_the_last_answer(tmp_path: Path) -> None:
    bare = load_tokenizer(chat_folder(tmp_path / "bare", TEMPLATE.replace("{{ eos_token }}", "")))
    example = encode_conversation(bare, talk(*TALK))
    assert example.token_ids[-1] == bare.eos_id and example.token_ids.count(bare.eos_id) == 1
    assert example.loss_mask[-1] == 1


def test_a_template_that_rewrites_earlier_messages_is_refused(tmp_path: Path) -> None:
    forgetful = TEMPLATE.replace("{{ m.content }}", "{{ m.content if loop.last or m.role == 'user' else '...' }}")
    loaded = load_tokenizer(chat_folder(tmp_path / "forgetful", forgetful))
    assert sum(encode_conversation(loaded, talk(USER, ANSWER)).loss_mask) == 2
    with pytest.raises(ConfigError, match=r"talks.jsonl:7: the chat template changes what stands before message 5"):
        encode_conversation(loaded, talk(*TALK))


def test_rows_have_messages_or_prompt_and_completion(tmp_path: Path) -> None:
    file = write(
        tmp_path / "talks.jsonl",
        {"messages": [USER, ANSWER], "source": "ignored"},
        {"prompt": "2+2?", "completion": "4"},
        {"prompt": [USER], "completion": [ANSWER]},
    )
    found = read_conversations([file])
    assert [conversation.messages for conversation in found] == [(USER, ANSWER)] * 3
    assert [conversation.where for conversation in found] == [f"{file}:{line}" for line in (1, 2, 3)]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": "hello"}, "no 'messages', and not both of 'prompt' and 'completion' (found text)"),
        ({"prompt": "2+2?"}, "no 'messages', and not both"),
        ({"messages": [USER]}, "the last message is of role 'user'; must be 'assistant'"),
        ({"messages": [ANSWER]}, "message 1: an answer to nothing"),
        ({"messages": [USER, {"role": "assistant", "content": " "}]}, "message 2: an answer without text"),
        ({"messages": "2+2?"}, "'messages' is a str; must be messages"),
        ({"messages": [{"role": "user"}]}, "messages[0] must have text under 'role' and 'content'"),
        ([], "a list; must be an object"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: Any, reason: str) -> None:
    file = write(tmp_path / "talks.jsonl", {"messages": [USER, ANSWER]}, row)
    with pytest.raises(ConfigError) as error:
        read_conversations([file])
    assert str(error.value).startswith(f"{file}:2: ") and reason in str(error.value)


def test_each_epoch_has_every_conversation_once_in_another_order(tokenizer: Tokenizer) -> None:
    talks = [talk({"role": "user", "content": f"{n}?"}, ANSWER) for n in range(20)]
    data, again = (ConversationData(talks, tokenizer, seed=3) for _ in range(2))
    epochs = [[data.example(20 * epoch + i).token_ids for i in range(20)] for epoch in range(3)]
    assert len({*epochs[0]}) == 20 and {*epochs[0]} == {*epochs[1]} == {*epochs[2]}
    assert epochs[0] != epochs[1] != epochs[2]
    assert again.example(45).token_ids == epochs[2][5], "an example depends on its index alone"


def config(folder: Path, data: Path, **supervised: Any) -> TltConfig:
    recipe = {"base": str(folder), "supervised": {"data": [str(data)], **supervised}}
    task = {"kind": "file", "name": "chat", "path": str(data.parent / "prompts.jsonl"), "verifier": "math"}
    return TltConfig.model_validate({"model": {"recipe": recipe}, "tasks": [task]})


def test_files_and_template_are_checked_before_a_run(folder: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "talks.jsonl", {"messages": [USER, ANSWER]})
    write(tmp_path / "prompts.jsonl", *({"prompt": f"{i}+2?", "reward_model": {"ground_truth": i}} for i in range(60)))
    assert check_tasks(config(folder, file)).violations == [], "the tasks need no worked solutions"
    write(file, {"messages": [USER]})
    (line,) = check_tasks(config(folder, file)).violations
    assert line.startswith(f"model.recipe.supervised.data: {file}:1: the last message")
    write(file, {"messages": [USER, ANSWER]})
    (tmp_path / "plain").mkdir()
    (line,) = check_tasks(config(tmp_path / "plain", file)).violations
    assert "has no chat template, which model.recipe.supervised.data needs" in line
    (line,) = check_tasks(config(folder, tmp_path / "none.jsonl")).violations
    assert "none.jsonl: no such file" in line


def test_the_files_contents_are_part_of_the_recipe(folder: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "talks.jsonl", {"messages": [USER, ANSWER]})
    before = recipe_folder(config(folder, file))
    moved = write(tmp_path / "moved.jsonl", {"messages": [USER, ANSWER]})
    assert recipe_folder(config(folder, moved)) == before
    write(file, {"messages": TALK})
    assert recipe_folder(config(folder, file)) != before


def test_what_conversations_cannot_have_is_refused(folder: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "talks.jsonl", {"messages": [USER, ANSWER]})
    with pytest.raises(ValidationError, match="careless_fraction concerns worked solutions"):
        config(folder, file, careless_fraction=0.5)
    with pytest.raises(ValidationError, match=r"supervised\.data is given without base"):
        TltConfig.model_validate(
            {"model": {"recipe": {"supervised": {"data": [str(file)]}}}, "tasks": [{"name": "gcd"}]}
        )

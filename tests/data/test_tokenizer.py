"""The tokenizer: every text survives, digits stay apart, training repeats, Hugging Face reads the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_tlt.config.schema import RolloutConfig
from megatron_tlt.config.task import TaskConfig
from megatron_tlt.data.tokenizer import HuggingFaceTokenizer, Tokenizer, encode_prompt, load_tokenizer, prompt_lengths
from megatron_tlt.data.tokenizer_training import BASE_ALPHABET, train_tokenizer
from megatron_tlt.errors import ConfigError
from megatron_tlt.tasks import GENERATORS, Problem, build_sources
from megatron_tlt.trainer.requests import training_sampling

TEXTS = ["sum 3+5-2\n8-2\n6\n#### 6", "naïve café\t€5", "éé ü"]
TEXT = st.text(alphabet=BASE_ALPHABET + "éï€\tü", max_size=60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(TEXTS, 128, path)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def hugging_face(folder: Path) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(folder)


@settings(max_examples=300)
@given(text=TEXT)
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    assert tokenizer.decode([*ids, tokenizer.eos_id, tokenizer.pad_id]) == text


def test_special_tokens_have_their_names_where_asked_for(
    tokenizer: Tokenizer, hugging_face: HuggingFaceTokenizer
) -> None:
    ids = [tokenizer.pad_id, *tokenizer.encode(" 3+5\n"), tokenizer.eos_id, *tokenizer.encode("8 ")]
    for read in (tokenizer, hugging_face):
        assert read.decode(ids, special_tokens=True) == "<pad> 3+5\n</s>8 "
        assert read.decode(ids) == " 3+5\n8 "


@settings(max_examples=300)
@given(before=TEXT, after=TEXT)
def test_pieces_do_not_cross_the_prompt(tokenizer: Tokenizer, before: str, after: str) -> None:
    # only the marker is longer than a character
    if "####" not in (before + after).replace(before, "", 1) and not before.endswith("#"):
        assert tokenizer.encode(before) + tokenizer.encode(after) == tokenizer.encode(before + after)


@settings(max_examples=200)
@given(text=TEXT)
def test_hugging_face_reads_the_same_folder(
    tokenizer: Tokenizer, hugging_face: HuggingFaceTokenizer, text: str
) -> None:
    assume(
        not any(name in text for name in ("<pad>", "</s>", "<unk>", "<unused"))
    )  # transformers reads them as the tokens
    assert hugging_face.encode(text) == tokenizer.encode(text)
    assert hugging_face.decode(tokenizer.encode(text)) == text


def test_special_ids_agree(tokenizer: Tokenizer, hugging_face: HuggingFaceTokenizer) -> None:
    assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.vocab_size) == (0, 1, 128)
    assert (hugging_face.pad_id, hugging_face.eos_id, hugging_face.vocab_size) == (0, 1, 128)
    assert not tokenizer.has_chat_template


def test_one_piece_per_character_and_one_for_the_marker(tokenizer: Tokenizer) -> None:
    text = "sort up 17 350"
    assert [tokenizer.decode([i]) for i in tokenizer.encode(text)] == list(text)
    assert [tokenizer.decode([i]) for i in tokenizer.encode("7\n#### 35")] == ["7", "\n", "####", " ", "3", "5"]


def test_unknown_characters_are_unknown_and_nothing_else_changes(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a\u4e00b")
    assert len(ids) == 3 and ids[1] == 2
    assert [ids[0], ids[2]] == tokenizer.encode("ab")


def test_training_again_gives_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    train_tokenizer(iter(TEXTS), 128, tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {p.name: p.read_bytes() for p in folder.iterdir()}


def test_every_task_fits_the_base_alphabet(tokenizer: Tokenizer) -> None:
    tasks = [TaskConfig(name=name) for name in sorted(GENERATORS)]
    for problem in build_sources(tasks, "train", 0).problems(0, 300):
        text = f"{problem.prompt}{problem.solution}"
        assert 2 not in tokenizer.encode(text) and tokenizer.decode(tokenizer.encode(text)) == text


def test_saved_elsewhere_is_the_same(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "hf")
    for loaded in (load_tokenizer(tmp_path / "hf"), HuggingFaceTokenizer(tmp_path / "hf")):
        assert loaded.encode("sum 3+5\n#### 8") == tokenizer.encode("sum 3+5\n#### 8")


def test_chat_goes_through_the_template_of_a_hugging_face_folder(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    (tmp_path / "tokenizer_meta.json").unlink()
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    loaded = load_tokenizer(tmp_path)
    chat = Problem("u", "s", "2+2?", "4", "math", {"messages": [{"role": "user", "content": "2+2?"}]})
    assert loaded.decode(encode_prompt(loaded, chat)) == "user:2+2?\n>"
    assert prompt_lengths(loaded, [chat] * 3) == [len("user:2+2?\n>")] * 3
    with pytest.raises(ConfigError, match=r"problem u: .* its tokenizer has no chat template"):
        encode_prompt(tokenizer, chat)
    assert "no chat template" in str(prompt_lengths(tokenizer, [chat])[0])


def test_a_chat_template_that_refuses_messages_is_named(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    (tmp_path / "tokenizer_meta.json").unlink()
    template = "{{ raise_exception('roles must alternate') }}"
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    chat = Problem("u", "s", "2+2?", "4", "math", {"messages": [{"role": "user", "content": "2+2?"}]})
    with pytest.raises(ConfigError, match=r"problem u: the chat template of .* refuses the messages: .*alternate"):
        encode_prompt(load_tokenizer(tmp_path), chat)


@settings(max_examples=50)
@given(texts=st.lists(TEXT, max_size=5))
def test_lengths_of_a_batch_are_those_of_single_prompts(
    tokenizer: Tokenizer, hugging_face: HuggingFaceTokenizer, texts: list[str]
) -> None:
    for loaded in (tokenizer, hugging_face):
        assert loaded.count_tokens(texts) == [len(loaded.encode(text)) for text in texts]


@pytest.mark.parametrize(
    ("generation", "model", "expected"),
    [
        ({"eos_token_id": [9, 1, 5]}, {"eos_token_id": 7}, (1, 5, 9)),
        ({"eos_token_id": 4}, {}, (1, 4)),
        ({}, {"eos_token_id": [7, 8]}, (1,)),
        (None, {"eos_token_id": [7, 8]}, (1, 7, 8)),
        (None, {"eos_token_id": None}, (1,)),
        (None, None, (1,)),
    ],
)
def test_a_response_stops_at_every_end_token_of_the_model(
    tokenizer: Tokenizer, tmp_path: Path, generation: object, model: object, expected: tuple[int, ...]
) -> None:
    tokenizer.save(tmp_path)
    for name, content in (("generation_config.json", generation), ("config.json", model)):
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    loaded = load_tokenizer(tmp_path)
    assert loaded.stop_ids == expected and loaded.eos_id == 1
    (tmp_path / "tokenizer_meta.json").unlink()
    assert HuggingFaceTokenizer(tmp_path).stop_ids == expected
    assert training_sampling(RolloutConfig(), loaded).stop_token_ids == expected


def test_a_wrong_end_token_is_named(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id is '</s>'; allowed: a token id"):
        load_tokenizer(tmp_path)


def test_bad_folders_are_named(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ConfigError, match="missing: no such folder"):
        load_tokenizer(tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="empty: transformers cannot read its tokenizer"):
        load_tokenizer(tmp_path / "empty")
    load_tokenizer(folder).save(tmp_path / "cut")
    (tmp_path / "cut" / "tokenizer.model").write_bytes((folder / "tokenizer.model").read_bytes()[:100])
    with pytest.raises(ConfigError, match=r"tokenizer\.model: not a readable SentencePiece model"):
        load_tokenizer(tmp_path / "cut")
    (tmp_path / "cut" / "tokenizer_meta.json").write_text('{"format": "other"}')
    with pytest.raises(ConfigError, match="format is 'other'; allowed is"):
        load_tokenizer(tmp_path / "cut")


def test_a_vocabulary_that_is_too_small_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"vocab_size: 99; must be at least 100"):
        train_tokenizer(TEXTS, 99, tmp_path)
    assert not any(tmp_path.iterdir())
    assert train_tokenizer(TEXTS, 100, tmp_path).vocab_size == 100

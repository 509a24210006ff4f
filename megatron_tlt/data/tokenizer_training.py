"""Trains a small SentencePiece tokenizer: one piece per character, and one for the final-answer marker.

It uses characters rather than merged pieces, because the generated tasks are about digits and letters: a model of a
million parameters would first have to learn the spelling of every piece.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_tlt.data.tokenizer import META_FILE, META_FORMAT, MODEL_FILE, SentencePieceTokenizer
from megatron_tlt.errors import ConfigError
from megatron_tlt.platform.files import atomic_write_bytes
from megatron_tlt.tasks.marker import ANSWER_MARKER

PAD, EOS, UNK = "<pad>", "</s>", "<unk>"
SPACE = "▁"  # SentencePiece's symbol for a space

#: Every text made of these survives encode and decode, for any training texts.
BASE_ALPHABET = "\n" + "".join(chr(code) for code in range(0x20, 0x7F))


def train_tokenizer(texts: Iterable[str], vocab_size: int, folder: Path | str, seed: int = 0) -> SentencePieceTokenizer:
    """Trains on ``texts``, writes ``folder`` (SentencePiece model, Hugging Face files) and loads it.

    The vocabulary has exactly ``vocab_size`` pieces: special ones, the marker, printable ASCII and newline, then the
    texts' other characters by descending frequency; unused pieces fill the rest. Other characters become unknown.
    Raises ConfigError if ``vocab_size`` is too small. The same texts give the same bytes.
    """
    import sentencepiece

    folder = Path(folder)
    alphabet = _alphabet(texts, vocab_size)
    # A line break would end a training sentence; as its own symbol it is kept.
    symbols = [ANSWER_MARKER, *(c for c in alphabet if c.isspace() and c != " ")]
    letters = "".join(SPACE if c == " " else c for c in alphabet if c == " " or not c.isspace())
    unused = vocab_size - 3 - len(symbols) - len(letters)
    model = io.BytesIO()
    sentencepiece.set_random_generator_seed(seed)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([letters.replace(SPACE, " ")]),
        model_writer=model,
        model_type="char",
        vocab_size=vocab_size,
        required_chars=letters,
        user_defined_symbols=symbols,
        control_symbols=[f"<unused{i}>" for i in range(unused)],
        character_coverage=1.0,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        split_digits=True,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        pad_piece=PAD,
        eos_piece=EOS,
        unk_piece=UNK,
        num_threads=1,
        minloglevel=2,
    )
    atomic_write_bytes(folder / MODEL_FILE, model.getvalue())
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    pieces = [processor.id_to_piece(i) for i in range(processor.vocab_size())]
    for name, content in _hugging_face_files(pieces, symbols).items():
        atomic_write_bytes(folder / name, content)
    atomic_write_bytes(folder / META_FILE, _json({"format": META_FORMAT, "vocab_size": len(pieces)}))
    return SentencePieceTokenizer(folder)


def _alphabet(texts: Iterable[str], vocab_size: int) -> list[str]:
    seen: Counter[str] = Counter()
    for text in texts:
        seen.update(text)
    room = vocab_size - 3 - 1 - len(BASE_ALPHABET)
    if room < 0:
        raise ConfigError(
            f"tokenizer.vocab_size: {vocab_size}; must be at least {vocab_size - room} (special pieces, the answer "
            "marker, newline and printable ASCII)"
        )
    # A null character would end SentencePiece's strings; its own space symbol is reserved for the space.
    others = [c for c in seen if c not in BASE_ALPHABET and c not in ("\0", SPACE)]
    others.sort(key=lambda c: (-seen[c], c))
    return [*BASE_ALPHABET, *others[:room]]


def _hugging_face_files(pieces: list[str], symbols: list[str]) -> dict[str, bytes]:
    """The same mapping as a ``tokenizers`` file: BPE without merges is one piece per character."""
    added: list[dict[str, Any]] = []
    for index, piece in enumerate(pieces):
        special = index < 3 or piece.startswith("<unused")
        if special or piece in symbols:
            flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": special}
            added.append({"id": index, "content": piece, **flags})
    model: dict[str, Any] = {
        "type": "BPE",
        "dropout": None,
        "unk_token": UNK,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {piece: index for index, piece in enumerate(pieces)},
        "merges": [],
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}, {"type": "Fuse"}],
        },
        "model": model,
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "pad_token": PAD,
        "unk_token": UNK,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
    }
    return {"tokenizer.json": _json(tokenizer), "tokenizer_config.json": _json(config)}


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, ensure_ascii=False, indent=1) + "\n").encode()

"""A small tokenizer with a chat template."""

from __future__ import annotations

from pathlib import Path

from megatron_tlt.data.tokenizer_training import train_tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""Ends the assistant's messages with the end of sequence, and all with a line break (a plain one would be trimmed)."""


def chat_folder(folder: Path, template: str = TEMPLATE) -> Path:
    """A folder with a tokenizer of 104 tokens, in Hugging Face's files alone, and this template."""
    folder.mkdir(parents=True)
    train_tokenizer([], 104, folder)
    (folder / "tokenizer_meta.json").unlink()
    (folder / "tokenizer.model").unlink()
    (folder / "chat_template.jinja").write_text(template)
    return folder

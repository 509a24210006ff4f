"""Tokenizers, supervised examples, and batching of sequences."""

from megatron_tlt.data.packing import balance, plan_micro_batches, plan_packs, sequence_cost, split_to_count
from megatron_tlt.data.supervised import Batch, Example, collate, encode_example, encode_examples
from megatron_tlt.data.tokenizer import Tokenizer, encode_prompt, load_tokenizer
from megatron_tlt.data.tokenizer_training import train_tokenizer

__all__ = [
    "Batch",
    "Example",
    "Tokenizer",
    "balance",
    "collate",
    "encode_example",
    "encode_examples",
    "encode_prompt",
    "load_tokenizer",
    "plan_micro_batches",
    "plan_packs",
    "sequence_cost",
    "split_to_count",
    "train_tokenizer",
]

"""Tokenizers, supervised examples, and batching of sequences."""

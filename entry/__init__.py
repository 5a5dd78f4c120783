"""Tercet: pretrain decoder-only language models from raw text, native to transformers, and look inside them."""

__version__ = "0.1.0"

"""tercet.tokenizer."""

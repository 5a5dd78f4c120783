"""A tokenizer for each kind of words."""

from typing import get_args

import pytest

from tercet.tokenizer import train_tokenizer
from tercet.tokenizer.pretokenization import Words


@pytest.fixture(scope="session", params=get_args(Words))
def words(request) -> Words:
    return request.param


@pytest.fixture(scope="session")
def tokenizer(words: Words, small_corpus, small_tokenizer):
    """1024 tokens. Shared by the whole session: a test that changes it works on a copy."""
    return small_tokenizer if words == "llama3" else train_tokenizer(small_corpus, 1024, words=words)

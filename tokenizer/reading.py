"""What goes wrong when a tokenizer is read, as errors of a class that can be caught."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def as_value_error() -> Iterator[None]:
    """Within, what `tokenizers` says of a damaged tokenizer.json is a ValueError; other errors stay what they are.

    It raises `Exception` itself, such as "Token `x` out of vocabulary" for a merge of tokens that are not there.

    Raises:
        ValueError: With its words.
    """
    try:
        yield
    except Exception as error:
        if type(error) is not Exception:
            raise
        raise ValueError(f"tokenizer.json is damaged: {error}") from error

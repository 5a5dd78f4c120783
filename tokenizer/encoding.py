"""Raw text to token ids, in bulk."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from tercet.tokenizer.pretokenization import Words, split_document, words_of
from tercet.tokenizer.training import check_text

PIECE_CHARS = 1 << 16
MAX_PIECE_CHARS = 1 << 18  # a word of more takes gigabytes: an Encoding's 100 bytes a character, and BPE's own
_BATCH_CHARS = 1 << 20  # an Encoding takes some 100 bytes a character until its ids are read: bound what is in flight


def encode_documents(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of raw documents, with nothing added: no end of text, no truncation, no padding.

    A special token's name inside a document ("<|endoftext|>" in a page about tokenizers) is encoded as ordinary text:
    no document can end itself or open a message. Runs on all cores; a long document is encoded in pieces, with the
    ids of the whole, but for one thing: 262,144 characters in which no word ends are cut there. The backend is switched
    over for the length of the call: give each thread its own tokenizer.

    Args:
        tokenizer: Any tokenizer with a `tokenizers` backend, Tercet's or another.
        texts: Documents; an empty one gives an empty list.

    Raises:
        ValueError: If a text holds a lone surrogate; it names the text by its index.
        TypeError: If a text is no string.
    """
    backend = tokenizer.backend_tokenizer
    words = exact_words(backend)
    documents: list[list[int]] = [[] for _ in texts]
    with _plain_text(backend):
        for owners, pieces in _batches(texts, words):
            encodings = backend.encode_batch_fast(pieces, add_special_tokens=False)
            for owner, encoding in zip(owners, encodings, strict=True):
                documents[owner] += encoding.ids
    return documents


def bytes_per_token(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> float:
    """UTF-8 bytes that a token stands for on average; what turns a loss per token into bits per byte.

    Raises:
        ValueError: If the texts hold no token.
    """
    num_tokens = sum(len(ids) for ids in encode_documents(tokenizer, texts))
    if num_tokens == 0:
        raise ValueError("bytes_per_token needs text: every one of the texts is empty")
    return sum(len(text.encode("utf-8")) for text in texts) / num_tokens


@contextmanager
def _plain_text(backend: Tokenizer) -> Iterator[None]:
    """Special tokens' names are text; what an earlier `tokenizer(..., truncation=True)` left behind is off."""
    special, truncation, padding = backend.encode_special_tokens, backend.truncation, backend.padding
    backend.encode_special_tokens = True
    backend.no_truncation()
    backend.no_padding()
    try:
        yield
    finally:
        backend.encode_special_tokens = special
        if truncation is not None:
            backend.enable_truncation(**truncation)
        if padding is not None:
            backend.enable_padding(**padding)


def exact_words(backend: Tokenizer) -> Words | None:
    """The tokenizer's words, if they alone decide where its text may be cut; otherwise None: it must not be.

    GPT-2's pattern, for one, joins two newlines that a cut would part.
    """
    if backend.normalizer is not None or backend.pre_tokenizer is None:
        return None
    if not all(token.special for token in backend.get_added_tokens_decoder().values()):
        return None
    return words_of(backend.pre_tokenizer)


def text_pieces(text: str, words: Words | None) -> Iterable[str]:
    """A text in pieces that are encoded at once: their ids, end to end, are those of the whole.

    Args:
        words: What `exact_words` says of the tokenizer; None leaves the text whole.
    """
    if words is None or len(text) <= PIECE_CHARS:
        return (text,)
    return split_document(text, PIECE_CHARS, MAX_PIECE_CHARS, words)


def _batches(texts: Sequence[str], words: Words | None) -> Iterator[tuple[list[int], list[str]]]:
    """Pieces of about `_BATCH_CHARS` characters together, each with the index of its document."""
    owners: list[int] = []
    pieces: list[str] = []
    num_chars = 0
    for index, text in enumerate(texts):
        check_text(text, index)
        for piece in text_pieces(text, words):
            owners.append(index)
            pieces.append(piece)
            num_chars += len(piece)
            if num_chars >= _BATCH_CHARS:
                yield owners, pieces
                owners, pieces, num_chars = [], [], 0
    if pieces:
        yield owners, pieces

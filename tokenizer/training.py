"""Train the tokenizer: byte-level BPE (arXiv:1508.07909, on bytes as in GPT-2), merged inside Llama 3's words."""

from collections.abc import Iterable, Iterator
from importlib import resources

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from tercet.tokenizer.pretokenization import bounded_word_splitter, split_document, word_splitter
from tercet.tokenizer.special_tokens import END_OF_TEXT, MESSAGE_END, MESSAGE_START, PADDING, SPECIAL_TOKENS

MIN_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
"""Every byte and every special token; a vocabulary of this size merges nothing."""

_PIECE_CHARS = 1 << 16
_MAX_WORD_CHARS = 256


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    *,
    min_frequency: int = 2,
    max_token_bytes: int = 32,
    model_max_length: int | None = None,
    show_progress: bool = False,
) -> PreTrainedTokenizerFast:
    """Learn a vocabulary of exactly `vocab_size` tokens from texts.

    The same texts in the same order give the same `tokenizer.json`, byte for byte. Special tokens hold ids 0 to 3; a
    special token's name inside a text is counted as the ordinary text that it is.

    Args:
        texts: Documents, read once, of any length; empty ones count for nothing.
        vocab_size: Ids in all: 4 special tokens, 256 bytes, and the merges that fit in the rest.
        min_frequency: Times a pair must occur in the texts to become a token.
        max_token_bytes: Longest token. Without a bound, languages that write no spaces spend the vocabulary on whole
            sentences; 32 bytes are ten Chinese characters, and longer than nearly every English word.
        model_max_length: Context length in tokens to write into the folder; None leaves it open.
        show_progress: Draw the trainer's progress bars on stderr.

    Returns:
        Padding on the left, no token added by itself, a chat template. `save_pretrained(folder)` writes what
        `AutoTokenizer.from_pretrained(folder)` reads.

    Raises:
        ValueError: If the vocabulary is below `MIN_VOCAB_SIZE` or more than the texts support, if there is no text, or
            if a text holds a lone surrogate.
        TypeError: If `texts` is one string, or holds something that is no string.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(
            f"vocab_size={vocab_size} is too small: 256 bytes and {len(SPECIAL_TOKENS)} special tokens need "
            f"{MIN_VOCAB_SIZE}; ask for at least that, 4096 or more for a useful tokenizer"
        )
    if max_token_bytes < 2:
        raise ValueError(f"max_token_bytes={max_token_bytes} leaves no room for a merge; give at least 2")
    if isinstance(texts, str):
        raise TypeError("texts is one string, whose items are characters; pass a list of documents: [text]")

    backend = Tokenizer(models.BPE(ignore_merges=True))  # as in Llama 3: a word in the vocabulary is one token at once
    backend.pre_tokenizer = bounded_word_splitter(_MAX_WORD_CHARS)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        max_token_length=max_token_bytes + 1,  # the trainer stops one short; it counts bytes, each a character by now
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=show_progress,
    )
    backend.train_from_iterator(_checked_pieces(texts), trainer)
    reached = backend.get_vocab_size()
    if reached < vocab_size:
        raise ValueError(
            f"vocab_size={vocab_size} is larger than the corpus supports: after {reached} tokens no pair "
            f"is left that occurs {min_frequency} times; give more text, or vocab_size={reached}"
        )
    backend.pre_tokenizer = word_splitter()
    backend.decoder = decoders.ByteLevel()
    # Adds no token. Were there none, transformers would put in its own, and the file would change when saved again.
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    return _as_pretrained(backend, model_max_length)


def _as_pretrained(backend: Tokenizer, model_max_length: int | None) -> PreTrainedTokenizerFast:
    limits = {} if model_max_length is None else {"model_max_length": model_max_length}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PADDING,
        extra_special_tokens=[MESSAGE_START, MESSAGE_END],
        padding_side="left",  # generation appends on the right: a row's last token must be its own
        clean_up_tokenization_spaces=False,
        chat_template=resources.files("tercet.tokenizer").joinpath("chat_template.jinja").read_text(encoding="utf-8"),
        **limits,
    )


def _checked_pieces(texts: Iterable[str]) -> Iterator[str]:
    """Pieces for the trainer, which holds a piece and its alignment to the source, some 100 bytes a character."""
    has_text = False
    for index, text in enumerate(texts):
        check_text(text, index)
        has_text = has_text or bool(text)
        yield from split_document(text, _PIECE_CHARS)
    if not has_text:
        raise ValueError(
            "the corpus is empty: no text has a single character; check the path and the name of its field"
        )


def check_text(text: str, index: int) -> None:
    """Refuse what has no UTF-8 form.

    Raises:
        TypeError: If `text` is no string.
        ValueError: If it holds a lone surrogate, which is half of a character.
    """
    if not isinstance(text, str):
        raise TypeError(f"text {index} is of type {type(text).__name__}, not a string; decode or convert it first")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"text {index} holds a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}, which "
            "is no valid Unicode; read the file as UTF-8 with errors='replace', or drop that text"
        ) from None

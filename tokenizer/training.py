"""Train the tokenizer: byte-level BPE (arXiv:1508.07909, on bytes as in GPT-2), merged inside words.

Memory is bounded twice, however large the corpus. A sample of at most `max_bytes` waits in a temporary file; of that,
in the order of the hashes, the trainer gets as much as its tables have room for in `max_trainer_bytes`.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import resources

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from tercet.tokenizer.pretokenization import Words, cut_long_words, may_hold_long_run, word_splitter
from tercet.tokenizer.sampling import SampleCounts, TextSampler
from tercet.tokenizer.special_tokens import END_OF_TEXT, MESSAGE_END, MESSAGE_START, PADDING, SPECIAL_TOKENS
from tercet.tokenizer.word_sketch import DistinctWords

MIN_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
"""Every byte and every special token; a vocabulary of this size merges nothing."""

MAX_BYTES = 256_000_000
"""Default size of the sample, which waits in a temporary file; of most text the trainer's memory admits less."""

MAX_DOCUMENTS = 2_000_000
"""Default number of documents in the sample; a long one counts once for each piece of about 65,536 characters."""

MAX_TRAINER_BYTES = 700_000_000
"""Default memory of the trainer's tables: with Python and its libraries, training stays below 1 GB."""

_MAX_RUN_CHARS = 256
# Measured with tokenizers 0.23 on English, Chinese and 500 other languages: 64 to 103 bytes for each byte of distinct
# words, and some 40 MB besides. Of a symbol it holds 32 bytes, and each pair holds the numbers of the words it is in.
_TRAINER_BYTES_PER_WORD_BYTE = 100
_TRAINER_BYTES_PER_WORD = 32
_BATCH_BYTES = 1 << 18
_SHARE_THAT_TELLS = 1 / 8


class VocabularyTooLargeError(ValueError):
    """A text has no merges for so many tokens.

    Attributes:
        largest: The size that it has merges for.
    """

    def __init__(self, message: str, *, largest: int) -> None:
        super().__init__(message)
        self.largest = largest


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    *,
    words: Words = "llama3",
    max_bytes: int = MAX_BYTES,
    max_documents: int = MAX_DOCUMENTS,
    max_trainer_bytes: int = MAX_TRAINER_BYTES,
    min_frequency: int = 2,
    max_token_bytes: int = 32,
    model_max_length: int | None = None,
    show_progress: bool = False,
    on_text_used: Callable[[SampleCounts], None] | None = None,
) -> PreTrainedTokenizerFast:
    """Learn a vocabulary of exactly `vocab_size` tokens from texts.

    The same texts, in any order, give the same `tokenizer.json`, byte for byte. Special tokens hold ids 0 to 3; a
    special token's name inside a text is counted as the ordinary text that it is. Texts that go beyond a budget are
    sampled by hash, evenly over all of them (`TextSampler`).

    Args:
        texts: Documents, read once, of any length; empty ones count for nothing.
        vocab_size: Ids in all: 4 special tokens, 256 bytes, and the merges that fit in the rest.
        words: What a word is: Llama 3's; or longer ones: BLOOM's, clauses, whatever is between blanks.
        max_bytes: UTF-8 bytes of text to sample; up to twice as many lie in a temporary file meanwhile.
        max_documents: Documents to sample; a long one counts once for each piece of it.
        max_trainer_bytes: Memory for the trainer's tables, which grow with the bytes of distinct words: a sample that
            would need more, as judged while it is read, ends there.
        min_frequency: Times a pair must occur in the texts to become a token.
        max_token_bytes: Longest token. Without a bound, languages that write no spaces spend the vocabulary on whole
            sentences; 32 bytes are ten Chinese characters, and longer than nearly every English word.
        model_max_length: Context length in tokens to write into the folder; None leaves it open.
        show_progress: Draw progress bars on stderr.
        on_text_used: Called with how much text there was, and how much of it the trainer got.

    Returns:
        Padding on the left, no token added by itself, a chat template. `save_pretrained(folder)` writes what
        `AutoTokenizer.from_pretrained(folder)` reads.

    Raises:
        ValueError: If the vocabulary is below `MIN_VOCAB_SIZE` or more than the texts support, if there is no text, if
            a text holds a lone surrogate, or if a budget leaves nothing to learn from.
        TypeError: If `texts` is one string, or holds something that is no string.
    """
    _check_settings(texts, vocab_size, max_token_bytes)
    # As in Llama 3 a word in the vocabulary is one token at once; llama.cpp ties that to the pattern.
    backend = Tokenizer(models.BPE(ignore_merges=words == "llama3"))
    backend.pre_tokenizer = word_splitter(words)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        max_token_length=max_token_bytes + 1,  # the trainer stops one short; it counts bytes, each a character by now
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=show_progress,
    )
    with TextSampler(max_bytes, max_documents, words) as sampler:
        counts = _sample(texts, sampler, show_progress)
        feed = _Feed(sampler.contents(), counts.kept_bytes, max_trainer_bytes, words)
        backend.train_from_iterator(feed, trainer)
    used = SampleCounts(counts.seen_pieces, counts.seen_bytes, feed.num_pieces, feed.num_bytes)
    _check_reached(backend.get_vocab_size(), vocab_size, min_frequency, used)
    if on_text_used is not None:
        on_text_used(used)
    return _as_pretrained(backend, model_max_length)


def _check_settings(texts: Iterable[str], vocab_size: int, max_token_bytes: int) -> None:
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(
            f"vocab_size={vocab_size} is too small: 256 bytes and {len(SPECIAL_TOKENS)} special tokens need "
            f"{MIN_VOCAB_SIZE}; ask for at least that, 4096 or more for a useful tokenizer"
        )
    if max_token_bytes < 2:
        raise ValueError(f"max_token_bytes={max_token_bytes} leaves no room for a merge; give at least 2")
    if isinstance(texts, str):
        raise TypeError("texts is one string, whose items are characters; pass a list of documents: [text]")


def _check_reached(reached: int, vocab_size: int, min_frequency: int, used: SampleCounts) -> None:
    if reached < vocab_size:
        raise VocabularyTooLargeError(
            f"vocab_size={vocab_size} is larger than the corpus supports: after {reached} tokens no pair "
            f"is left that occurs {min_frequency} times; give more text{'' if used.is_whole else ' or a larger budget'}"
            f", or vocab_size={reached}",
            largest=reached,
        )


def _as_pretrained(backend: Tokenizer, model_max_length: int | None) -> PreTrainedTokenizerFast:
    backend.decoder = decoders.ByteLevel()
    # Adds no token. Were there none, transformers would put in its own, and the file would change when saved again.
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
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


def _sample(texts: Iterable[str], sampler: TextSampler, show_progress: bool) -> SampleCounts:
    with tqdm(unit=" characters", unit_scale=True, desc="Reading text", disable=not show_progress) as bar:
        for index, text in enumerate(texts):
            check_text(text, index)
            sampler.add(text)
            bar.update(len(text))
    counts = sampler.counts()
    if not counts.seen_bytes:
        raise ValueError(
            "the corpus is empty: no text has a single character; check the path and the name of its field"
        )
    return counts


class _Feed:
    """Hands the trainer lists of pieces until its tables would outgrow their memory. To be iterated over once."""

    def __init__(self, contents: Iterator[bytes], num_bytes: int, max_trainer_bytes: int, words: Words) -> None:
        """
        Args:
            contents: Pieces in UTF-8, in an order that has nothing to do with what is in them.
            num_bytes: Bytes of all of them.
            max_trainer_bytes: Memory for the trainer's tables.
            words: What a word is, for cutting those that are too long to count.
        """
        self._contents = contents
        self._kind_of_words: Words = words
        self._all_bytes = num_bytes
        self._max_trainer_bytes = max_trainer_bytes
        self._words = DistinctWords(words)
        # Were every byte of it new, there would be room: the common small corpus is not looked at word by word.
        self._has_room_for_all = self._trainer_bytes(num_bytes, num_bytes // 8) <= max_trainer_bytes
        self.num_pieces = 0
        self.num_bytes = 0

    def __iter__(self) -> Iterator[list[str]]:
        # Prepared in a thread, a batch ahead: while the trainer asks for text, none of its threads counts words.
        batches = (self._for_trainer(batch) for batch in self._batches())
        with ThreadPoolExecutor(1) as thread:
            coming = thread.submit(next, batches, None)
            while batch := coming.result():
                coming = thread.submit(next, batches, None)
                yield batch

    def _for_trainer(self, batch: list[bytes]) -> list[str]:
        """The texts of a batch, long words cut; none where there is no room for them."""
        together = b"\n".join(batch)
        if not self._has_room_for_all and not self._has_room(together):
            return []
        self.num_pieces += len(batch)
        self.num_bytes += len(together) - len(batch) + 1
        texts = [content.decode("utf-8") for content in batch]
        if not may_hold_long_run(together, _MAX_RUN_CHARS, self._kind_of_words):
            return texts
        return [part for text in texts for part in cut_long_words(text, _MAX_RUN_CHARS, self._kind_of_words)]

    def _has_room(self, together: bytes) -> bool:
        words = self._words
        words.add(together)
        needed = self._trainer_bytes(words.num_bytes, words.num_words)
        if needed > self._max_trainer_bytes and self.num_pieces:
            return False
        # In the order of hashes new words become rarer: a part of the text bounds the whole, and the rest is not
        # looked at.
        share = (self.num_bytes + len(together)) / self._all_bytes
        self._has_room_for_all = share > _SHARE_THAT_TELLS and needed <= share * self._max_trainer_bytes
        return True

    @staticmethod
    def _trainer_bytes(word_bytes: int, num_words: int) -> int:
        return word_bytes * _TRAINER_BYTES_PER_WORD_BYTE + num_words * _TRAINER_BYTES_PER_WORD

    def _batches(self) -> Iterator[list[bytes]]:
        """Pieces of a fixed size together, so that where they end is no accident."""
        batch, num_bytes = [], 0
        for content in self._contents:
            batch.append(content)
            num_bytes += len(content) + 1
            if num_bytes >= _BATCH_BYTES:
                yield batch
                batch, num_bytes = [], 0
        if batch:
            yield batch


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

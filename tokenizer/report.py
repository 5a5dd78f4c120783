"""How well a tokenizer fits text: what a token stands for in each source, beside other tokenizers on the same text."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from tercet.tokenizer.encoding import encode_documents
from tercet.tokenizer.pretokenization import word_splitter
from tercet.tokenizer.sampling import TextSampler

REPORT_NAME = "tokenizer_report.json"
"""File beside `tokenizer.json` that keeps the figures."""

_SOURCE_BYTES = 2_000_000  # of text for each source: two thousand documents of a page, enough for three digits
_SOURCE_DOCUMENTS = 20_000
_MAX_SOURCES = 64
_OTHER = "(others)"
_NUM_LONGEST = 24
_BATCH_CHARS = 1 << 20


@dataclass(frozen=True)
class SourceFigures:
    """One source's text, and the tokens that it takes.

    Attributes:
        num_documents: Documents, a long one counted once for each piece of it.
        num_bytes: UTF-8 bytes.
        num_words: Words as Tercet's pre-tokenizer cuts them, whatever the tokenizer.
        num_tokens: Tokens by name of the tokenizer.
    """

    num_documents: int
    num_bytes: int
    num_words: int
    num_tokens: dict[str, int]

    def bytes_per_token(self, tokenizer: str) -> float:
        """UTF-8 bytes that a token stands for; more is better."""
        return self.num_bytes / self.num_tokens[tokenizer]

    def fertility(self, tokenizer: str) -> float:
        """Tokens per word; 1 is the least that a pre-tokenizer of words allows."""
        return self.num_tokens[tokenizer] / max(self.num_words, 1)


@dataclass(frozen=True)
class TokenizerReport:
    """Figures of a tokenizer, the first of `tokenizers`, and of others on the same text.

    Attributes:
        held_out: Whether the tokenizer was trained without this text.
        tokenizers: Sizes of the vocabularies by name.
        sources: Figures by source.
        total: Figures of all sources together, each with as much text as was sampled of it.
        unused_tokens: Ids that no text came to, special ones apart.
        longest_tokens: The vocabulary's longest, readable, longest first.
    """

    held_out: bool
    tokenizers: dict[str, int]
    sources: dict[str, SourceFigures]
    total: SourceFigures
    unused_tokens: list[int] = field(repr=False)
    longest_tokens: list[str] = field(repr=False)

    @property
    def name(self) -> str:
        """The tokenizer that this is about."""
        return next(iter(self.tokenizers))

    def to_dict(self) -> dict[str, Any]:
        """For JSON: the counts, and the ratios made of them."""
        return {
            "held_out": self.held_out,
            "tokenizers": self.tokenizers,
            "total": self._ratios(self.total),
            "sources": {name: self._ratios(figures) for name, figures in self.sources.items()},
            "num_unused_tokens": len(self.unused_tokens),
            "unused_tokens": self.unused_tokens,
            "longest_tokens": self.longest_tokens,
        }

    def _ratios(self, figures: SourceFigures) -> dict[str, Any]:
        return asdict(figures) | {
            "bytes_per_token": {name: round(figures.bytes_per_token(name), 4) for name in self.tokenizers},
            "tokens_per_word": {name: round(figures.fertility(name), 4) for name in self.tokenizers},
        }


class ReportText:
    """A sample of each source's text, by hash, in temporary files: what a report is made of."""

    def __init__(self) -> None:
        self._samplers: dict[str, TextSampler] = {}
        self._files = ExitStack()

    def __enter__(self) -> "ReportText":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._files.close()

    def __len__(self) -> int:
        return sum(sampler.counts().kept_pieces for sampler in self._samplers.values())

    def add(self, text: str, source: str) -> None:
        """Take a document of a source; from the 64th source on they are counted as one."""
        if source not in self._samplers and len(self._samplers) >= _MAX_SOURCES:
            source = _OTHER
        if source not in self._samplers:
            sampler = TextSampler(_SOURCE_BYTES, _SOURCE_DOCUMENTS)
            self._samplers[source] = self._files.enter_context(sampler)
        self._samplers[source].add(text)

    def by_source(self) -> Iterator[tuple[str, Iterator[str]]]:
        """Each source that has text, and its pieces."""
        for source, sampler in self._samplers.items():
            if sampler.counts().kept_pieces:
                yield source, sampler.pieces()


def make_report(
    tokenizers: Mapping[str, PreTrainedTokenizerFast], text: ReportText, *, held_out: bool
) -> TokenizerReport:
    """Measure tokenizers on the same text.

    Args:
        tokenizers: By name; the first is the one that the report is about.
        held_out: Whether it was trained without this text.

    Raises:
        ValueError: If there is no text, or no tokenizer.
    """
    if not tokenizers:
        raise ValueError("a report needs a tokenizer")
    used: set[int] = set()
    sources = {source: _measure(tokenizers, pieces, used) for source, pieces in text.by_source()}
    if not sources:
        raise ValueError("a report needs text: every document is empty")
    total = SourceFigures(
        sum(figures.num_documents for figures in sources.values()),
        sum(figures.num_bytes for figures in sources.values()),
        sum(figures.num_words for figures in sources.values()),
        {name: sum(figures.num_tokens[name] for figures in sources.values()) for name in tokenizers},
    )
    subject = next(iter(tokenizers.values()))
    unused = sorted(set(subject.get_vocab().values()) - used - set(subject.all_special_ids))
    return TokenizerReport(
        held_out=held_out,
        tokenizers={name: len(tokenizer) for name, tokenizer in tokenizers.items()},
        sources=sources,
        total=total,
        unused_tokens=unused,
        longest_tokens=longest_tokens(subject, _NUM_LONGEST),
    )


def longest_tokens(tokenizer: PreTrainedTokenizerFast, count: int) -> list[str]:
    """The tokens of most UTF-8 bytes that are whole characters, longest first, equal ones in the order of their ids."""
    special = set(tokenizer.all_special_ids)
    ids = [index for index in sorted(tokenizer.get_vocab().values()) if index not in special]
    # Decoded by the tokenizer's own decoder, one by one: what a token is spelt like inside differs between kinds.
    texts = [text for text in tokenizer.batch_decode([[index] for index in ids]) if "\ufffd" not in text]
    return sorted(texts, key=lambda text: -len(text.encode("utf-8")))[:count]


def readable(token: str) -> str:
    """A token as it can be shown in a line: blanks and what has no shape of its own are visible."""
    shown = "".join(
        char if char.isprintable() and char != " " else _ESCAPES.get(char, ascii(char)[1:-1]) for char in token
    )
    return _shortened(shown)


_ESCAPES = {" ": "␣", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def _shortened(shown: str) -> str:
    """Runs of one character as in a pattern: forty blanks say no more than `␣{40}`."""
    parts: list[str] = []
    start = 0
    for end in range(1, len(shown) + 1):
        if end == len(shown) or shown[end] != shown[start]:
            length = end - start
            parts.append(f"{shown[start]}{{{length}}}" if length > 4 else shown[start:end])
            start = end
    return "".join(parts)


def _measure(tokenizers: Mapping[str, PreTrainedTokenizerFast], pieces: Iterator[str], used: set[int]) -> SourceFigures:
    """Figures of one source; adds to `used` the ids that the first tokenizer came to."""
    counter = _word_counter()
    num_documents = num_bytes = num_words = 0
    num_tokens = dict.fromkeys(tokenizers, 0)
    subject = next(iter(tokenizers))
    for batch in _batches(pieces):
        num_documents += len(batch)
        num_bytes += sum(len(text.encode("utf-8")) for text in batch)
        num_words += sum(len(encoding.ids) for encoding in counter.encode_batch_fast(batch))
        for name, tokenizer in tokenizers.items():
            for ids in encode_documents(tokenizer, batch):
                num_tokens[name] += len(ids)
                if name == subject:
                    used.update(ids)
    return SourceFigures(num_documents, num_bytes, num_words, num_tokens)


def _word_counter() -> Tokenizer:
    """Gives a token for each word: the pre-tokenizer runs on all cores, as it does inside every tokenizer."""
    counter = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    counter.pre_tokenizer = word_splitter()
    return counter


def _batches(pieces: Iterator[str]) -> Iterator[Sequence[str]]:
    batch: list[str] = []
    num_chars = 0
    for piece in pieces:
        batch.append(piece)
        num_chars += len(piece)
        if num_chars >= _BATCH_CHARS:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch

"""Documents to prepared data: tokenized once, shard by shard, so that an interrupted preparation loses one at most.

Documents are always read from the first, which is cheap, and hashed. A shard that is on disk already, made with the
same settings from documents of the same hash, is kept; the first that is not, and all behind it, are made anew. So a
changed tokenizer, split or text makes a new set, a grown corpus costs only what was added, and a finished set costs
one reading.

One process reads, hashes and writes, in order; others tokenize meanwhile. The files are the same for any number of
them.
"""

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from tercet.tokenizer.encoding import PIECE_CHARS, exact_words
from tercet.tokenizer.pretokenization import Words
from tercet.training.documents import DataError, Document
from tercet.training.duplicates import DuplicateFilter, normalized_digest
from tercet.training.merge import merged_set
from tercet.training.parallel_encoding import PieceEncoder
from tercet.training.pieces import Piece, cut_into_pieces
from tercet.training.shard_files import (
    ShardWriter,
    hash_text,
    remove_shards,
    remove_temporary_files,
    settings_fingerprint,
    shard_name,
    write_manifest,
)
from tercet.training.skips import SkipReport
from tercet.training.split import digest_is_validation, document_digest, part_of, split_tail
from tercet.training.token_set import (
    TRAIN,
    VALIDATION,
    PreparationReport,
    PreparedData,
    ShardIndex,
    SourceReport,
    TokenSet,
    differing_settings,
)

__all__ = ["PreparationReport", "PreparedData", "SourceReport", "TokenSet", "available_cores", "prepare"]

_FORMAT = 1

Duplicates = bool | Literal["normalized"]


class _Read(NamedTuple):
    """A document as it was read, with what was found out about it; `kept` is false for duplicates and empty texts."""

    document: Document
    digest: bytes
    kept: bool


class _End(NamedTuple):
    """Stands in the stream behind the pieces of a text that is stored as one document.

    Attributes:
        split: Of the text; None stores nothing.
        num_bytes: Of the text in UTF-8.
        num_label_bytes: Of them, those that labels stand for.
        is_label: Whether the end of text behind it is a label.
        source: Of the document.
        count: Under which the document counts, if this is the last of it; None if more of it follows.
        hashed: What the document adds to the hash of the content.
        num_chars: Of the document.
    """

    split: int | None
    num_bytes: int
    num_label_bytes: int
    is_label: bool
    source: str
    count: str | None
    hashed: bytes = b""
    num_chars: int = 0


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def prepare(
    documents: Iterable[Document],
    tokenizer: PreTrainedTokenizerFast,
    data_dir: Path,
    *,
    validation_fraction: float,
    split_by: Literal["document", "tail"],
    drop_duplicates: Duplicates,
    progress: bool = True,
    tokens_per_shard: int = 1 << 24,
    workers: int | None = None,
    part: tuple[int, int] | None = None,
    skips: SkipReport | None = None,
    on_replaced: Callable[[list[str]], None] | None = None,
) -> PreparedData:
    """Tokenize documents into `data_dir`, or go on where an earlier call with the same arguments stopped.

    A set that `merge` made of parts is taken as it stands, unread, if its settings are these.

    Args:
        documents: Read once, from the first to the last.
        tokenizer: Its end-of-text token is stored behind every document.
        data_dir: Made if missing. Only files of an earlier preparation are replaced in it.
        validation_fraction: Part of the documents, or of each document's characters, that is held out.
        split_by: "document" holds out whole documents by their hash; "tail" the end of each, for a corpus that is one
            long text.
        drop_duplicates: Keep only the first of equal documents; "normalized" also takes documents for equal that
            differ in white space or in the composition of characters alone (`normalized_digest`).
        progress: Show a progress bar on standard error.
        tokens_per_shard: A shard ends with the document that brings it to this many; bounds lost work.
        workers: Processes that tokenize; None is the number of cores. The result does not depend on it.
        part: (i, n) takes the documents of part i of n, i from 0, by hash: equal documents are of one part. `merge`
            joins the parts.
        skips: What reading the documents left out, complete once they are read; goes into the manifest.
        on_replaced: Called before the work where a finished set of other settings stands there, with their names.

    Raises:
        DataError: If there is no document, the validation split comes out empty, the disk is full, or data_dir holds
            a merged set of other settings.
        ValueError: If validation_fraction is not in [0, 1), workers < 1, part is none, or the tokenizer has no
            end-of-text token.
    """
    settings = _settings(tokenizer, validation_fraction, split_by, drop_duplicates, tokens_per_shard)
    if part is not None:
        if not 0 <= part[0] < part[1]:
            raise ValueError(f"part must be (i, n) with 0 <= i < n, not {part}.")
        settings["part"] = list(part)
    data_dir = Path(data_dir)
    if (merged := merged_set(data_dir, settings)) is not None:
        return merged
    if on_replaced is not None and (different := differing_settings(data_dir, settings)):
        on_replaced(different)
    data_dir.mkdir(parents=True, exist_ok=True)
    remove_temporary_files(data_dir)
    preparation = _Preparation(data_dir, tokenizer, settings, available_cores() if workers is None else workers)
    with tqdm(
        unit="B", unit_scale=True, desc="Preparing", disable=None if progress else True, leave=False, dynamic_ncols=True
    ) as bar:
        try:
            preparation.run(documents, bar)
        finally:
            remove_temporary_files(data_dir)
    preparation.finish(skips)
    return PreparedData.open(data_dir)


def _settings(
    tokenizer: PreTrainedTokenizerFast,
    fraction: float,
    split_by: str,
    drop_duplicates: Duplicates,
    tokens_per_shard: int,
) -> dict[str, Any]:
    """All that decides which tokens a document becomes, and where they are stored."""
    split_tail("", fraction)  # refuses a fraction that is none, before any work
    if tokenizer.eos_token_id is None:
        raise ValueError("The tokenizer has no eos_token: a document's end could not be marked. Train one that has.")
    return {
        "format": _FORMAT,
        "tokenizer": tokenizer_hash(tokenizer),
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "dtype": "uint16" if len(tokenizer) <= 1 << 16 else "uint32",
        "validation_fraction": fraction,
        "split_by": split_by,
        "drop_duplicates": drop_duplicates,
        "tokens_per_shard": tokens_per_shard,
    }


def tokenizer_hash(tokenizer: PreTrainedTokenizerFast) -> str:
    """Stands for all that decides a text's ids; what an earlier call has set, truncation and padding, does not."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    for call_state in ("truncation", "padding"):
        state.pop(call_state, None)
    return hash_text(json.dumps(state, sort_keys=True))


class _Preparation:
    """One call of `prepare`: the shards that stand, and the one that is being written."""

    def __init__(
        self, data_dir: Path, tokenizer: PreTrainedTokenizerFast, settings: dict[str, Any], workers: int
    ) -> None:
        self.data_dir = data_dir
        self.settings = settings
        self.fingerprint = settings_fingerprint(settings)
        backend: Tokenizer = tokenizer.backend_tokenizer
        self.encoder = PieceEncoder(backend.to_str(), settings["dtype"], workers)
        self.words: Words | None = exact_words(backend)
        self.end = np.array([settings["eos_token_id"]], dtype=settings["dtype"])
        self.names: list[str] = []
        self.splits: set[int] = set()
        self.by_source: dict[str, SourceReport] = {}
        self.content, self.corpus = hashlib.blake2b(digest_size=16), hashlib.blake2b(digest_size=16)

    def run(self, documents: Iterable[Document], bar: tqdm) -> None:
        reads = self.read(documents)
        changed = self.keep_standing_shards(reads, bar)
        self.write(itertools.chain(changed, reads), bar)

    def read(self, documents: Iterable[Document]) -> Iterator[_Read]:
        """The documents of this part, with their digests, and whether they are kept."""
        drop, part = self.settings["drop_duplicates"], self.settings.get("part")
        seen = DuplicateFilter(spill_dir=self.data_dir)
        for number, document in enumerate(documents, start=1):
            try:
                digest = document_digest(document.text)
            except UnicodeEncodeError as error:
                raise DataError(
                    f"Document {number} of {document.source} holds a lone surrogate (character {error.start}), which "
                    f"UTF-8 cannot carry. Mend or remove the document."
                ) from error
            same = normalized_digest(document.text) if drop == "normalized" else digest
            if part is not None:
                self.corpus.update(_hashed(digest, document))
                if part_of(same, part[1]) != part[0]:
                    continue
            kept = bool(document.text) and not (drop and seen.is_duplicate(same))
            if kept and document.segments is not None:
                self._check_segments(number, document)
            yield _Read(document, digest, kept)

    def keep_standing_shards(self, reads: Iterator[_Read], bar: tqdm) -> Iterator[_Read]:
        """Take over the shards on disk whose documents come again; return what was read past the last of them."""
        while True:
            try:
                index = ShardIndex.load(self.data_dir, shard_name(len(self.names)), self.settings["dtype"])
            except DataError:
                return iter(())
            if index.fingerprint != self.fingerprint:
                return iter(())
            before, pending = self.content.copy(), []
            num_chars = 0
            # `pending` is the text of one shard: should it turn out changed, it cannot be read a second time.
            while len(pending) < index.documents_read and (read := next(reads, None)) is not None:
                pending.append(read)
                self.content.update(_hashed(read.digest, read.document))
                num_chars += len(read.document.text)
            if len(pending) < index.documents_read or self.content.hexdigest() != index.content:
                self.content = before
                return _drained(pending)
            self.take_over(index)
            bar.update(num_chars)

    def take_over(self, index: ShardIndex) -> None:
        """Count a finished shard as one of this set."""
        self.names.append(index.name)
        self.splits.update(np.unique(index.split).tolist())
        for source, counts in index.report.items():
            self.by_source[source] = self.by_source.get(source, SourceReport()) + counts

    def write(self, reads: Iterator[_Read], bar: tqdm) -> None:
        """Encode the documents and write them, shard after shard."""
        shard: ShardWriter | None = None
        try:
            for item, ids in self.encoder.run(self.items(reads)):
                if shard is None:
                    shard = ShardWriter(self.data_dir, shard_name(len(self.names)), self.settings["dtype"])
                if ids is not None:
                    shard.add_tokens(ids, item.is_label)
                    continue
                if item.split is not None:
                    shard.add_tokens(self.end, item.is_label)
                    shard.end_text(item.split, item.num_bytes, item.num_label_bytes, item.source)
                if item.count is not None:
                    shard.end_document(item.source, item.count)
                    self.content.update(item.hashed)
                    bar.update(item.num_chars)
                    if shard.num_tokens >= self.settings["tokens_per_shard"]:
                        self.finish_shard(shard)
                        shard = None
            if shard is not None:
                self.finish_shard(shard)
        except BaseException:
            if shard is not None:
                shard.abandon()
            raise

    def finish_shard(self, shard: ShardWriter) -> None:
        """Put a shard where an earlier one may stand: only now is that one, and what came behind it, given up."""
        remove_shards(self.data_dir, len(self.names))
        self.take_over(shard.finish(self.fingerprint, self.content.hexdigest()))

    def items(self, reads: Iterator[_Read]) -> Iterator[Piece | _End]:
        """The documents as the encoder takes them: pieces of each text to store, and what follows them."""
        fraction, by_tail = self.settings["validation_fraction"], self.settings["split_by"] == "tail"
        for document, digest, kept in reads:
            text, source, is_plain = document.text, document.source, document.segments is None
            end = (_hashed(digest, document), len(text))
            if not kept:
                yield _End(None, 0, 0, True, source, "duplicates_dropped" if text else "empty_dropped", *end)
            elif by_tail:
                head, tail = split_tail(text, fraction)
                head_bytes, tail_bytes = _num_bytes(head), _num_bytes(tail)
                if head:
                    yield from cut_into_pieces(head, None, self.words)
                    yield _End(TRAIN, head_bytes, head_bytes, True, source, None if tail else "documents", *end)
                if tail:
                    yield from cut_into_pieces(tail, None, self.words)
                    yield _End(VALIDATION, tail_bytes, tail_bytes, True, source, "documents", *end)
            else:
                if is_plain and len(text) <= PIECE_CHARS:  # nearly all of them: no generator for one piece
                    yield Piece(text)
                else:
                    yield from cut_into_pieces(text, document.segments, self.words)
                split = VALIDATION if digest_is_validation(digest, fraction) else TRAIN
                yield _End(split, _num_bytes(text), _num_label_bytes(document), is_plain, source, "documents", *end)

    def finish(self, skips: SkipReport | None) -> None:
        """Write the manifest, which makes the shards a set; nothing to do if it is the one that stands there.

        Raises:
            DataError: If there is nothing to train on or nothing to validate with; nothing is left behind then.
        """
        if complaint := self._complaint(sum(counts.documents for counts in self.by_source.values())):
            if self.names:  # made by this call: an earlier set stands untouched as long as nothing replaced it
                remove_shards(self.data_dir, 0)
            raise DataError(complaint)
        more = {"corpus": self.corpus.hexdigest()} if "part" in self.settings else {}
        write_manifest(
            self.data_dir, self.settings, self.content.hexdigest(), self.names, self.by_source, skips or SkipReport(),
            **more,
        )  # fmt: skip

    def _complaint(self, num_documents: int) -> str:
        part = self.settings.get("part")
        if not num_documents and part is not None:
            return f"No document falls into part {part[0]} of {part[1]}. Divide the data into fewer parts."
        if not num_documents:
            return "There is no document in the data. Check the path and the column that holds the text."
        fraction = self.settings["validation_fraction"]
        names = ((TRAIN, "training"), (VALIDATION, "validation"))
        missing = [name for split, name in names if split not in self.splits]
        if not missing or fraction == 0 or part is not None:  # a part may lack one: what counts is the merged set
            return ""
        return (
            f"None of the documents ({num_documents}) falls into the {missing[0]} split with validation_fraction "
            f"{fraction:g}. Set split_by to 'tail', which holds out the end of each document, or change the fraction."
        )

    def _check_segments(self, number: int, document: Document) -> None:
        assert document.segments is not None and "".join(s.text for s in document.segments) == document.text
        if self.settings["split_by"] == "tail":
            raise DataError(
                f"Document {number} of {document.source} is a conversation, whose end cannot be held out. Set "
                f"split_by to 'document'."
            )


def _hashed(digest: bytes, document: Document) -> bytes:
    """What a document adds to the hash of the content: all that decides what is stored of it."""
    hashed = digest + document.source.encode("utf-8", "surrogateescape") + b"\0"
    for segment in document.segments or ():
        hashed += b"%d:%d%d," % (len(segment.text), segment.is_template, segment.is_label)
    return hashed


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8"))


def _num_label_bytes(document: Document) -> int:
    """Bytes that the model itself is to write; a special token of the template is no text."""
    if document.segments is None:
        return _num_bytes(document.text)
    return sum(_num_bytes(s.text) for s in document.segments if s.is_label and not s.is_template)


def _drained(reads: list[_Read]) -> Iterator[_Read]:
    """The items of a list, each let go once it is given out."""
    reads.reverse()
    while reads:
        yield reads.pop()

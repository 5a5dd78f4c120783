"""Documents to prepared data: tokenized once, shard by shard, so that an interrupted preparation loses one at most.

Documents are always read from the first, which is cheap, and hashed. A shard that is on disk already, made with the
same settings from documents of the same hash, is kept; the first that is not, and all behind it, are made anew. So a
changed tokenizer, split or text makes a new set, a grown corpus costs only what was added, and a finished set costs
one reading.
"""

import hashlib
import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from tercet.tokenizer import encode_documents
from tercet.training.atomic import TEMPORARY_SUFFIX, is_disk_full, write_atomically
from tercet.training.documents import DataError, Document
from tercet.training.split import DuplicateFilter, digest_is_validation, document_digest, split_tail
from tercet.training.token_set import (
    MANIFEST,
    TRAIN,
    VALIDATION,
    PreparationReport,
    PreparedData,
    ShardIndex,
    SourceReport,
    TokenSet,
)

__all__ = ["PreparationReport", "PreparedData", "SourceReport", "TokenSet", "prepare"]

_FORMAT = 1
_DOCUMENTS_PER_BATCH = 4096
_CHARS_PER_BATCH = 1 << 21


class _Read(NamedTuple):
    """A document as it was read, with what was found out about it; `kept` is false for duplicates and empty texts."""

    document: Document
    digest: bytes
    kept: bool


def prepare(
    documents: Iterable[Document],
    tokenizer: PreTrainedTokenizerFast,
    data_dir: Path,
    *,
    validation_fraction: float,
    split_by: Literal["document", "tail"],
    drop_duplicates: bool,
    progress: bool = True,
    tokens_per_shard: int = 1 << 24,
) -> PreparedData:
    """Tokenize documents into `data_dir`, or go on where an earlier call with the same arguments stopped.

    Args:
        documents: Read once, from the first to the last.
        tokenizer: Its end-of-text token is stored behind every document.
        data_dir: Made if missing. Only files of an earlier preparation are replaced in it.
        validation_fraction: Part of the documents, or of each document's characters, that is held out.
        split_by: "document" holds out whole documents by their hash; "tail" the end of each, for a corpus that is one
            long text.
        drop_duplicates: Keep only the first of equal documents.
        progress: Show a progress bar on standard error.
        tokens_per_shard: A shard ends with the document that brings it to this many; bounds memory and lost work.

    Raises:
        DataError: If there is no document, the validation split comes out empty, or the disk is full.
        ValueError: If validation_fraction is not in [0, 1), or the tokenizer has no end-of-text token.
    """
    settings = _settings(tokenizer, validation_fraction, split_by, drop_duplicates, tokens_per_shard)
    data_dir = Path(data_dir)
    data_dir.mkdir(parents=True, exist_ok=True)
    _remove(data_dir.glob(f"*{TEMPORARY_SUFFIX}"))
    preparation = _Preparation(data_dir, tokenizer, settings)
    with tqdm(
        unit="B", unit_scale=True, desc="Preparing", disable=None if progress else True, leave=False, dynamic_ncols=True
    ) as bar:
        try:
            preparation.run(_watched(documents, drop_duplicates, bar))
        finally:
            _remove(data_dir.glob(f"*{TEMPORARY_SUFFIX}"))
    preparation.finish()
    return PreparedData.open(data_dir)


def _settings(
    tokenizer: PreTrainedTokenizerFast, fraction: float, split_by: str, drop_duplicates: bool, tokens_per_shard: int
) -> dict[str, Any]:
    """All that decides which tokens a document becomes, and where they are stored."""
    split_tail("", fraction)  # refuses a fraction that is none, before any work
    if tokenizer.eos_token_id is None:
        raise ValueError("The tokenizer has no eos_token: a document's end could not be marked. Train one that has.")
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    for call_state in ("truncation", "padding"):  # left behind by whoever called the tokenizer last
        state.pop(call_state, None)
    return {
        "format": _FORMAT,
        "tokenizer": _hash(json.dumps(state, sort_keys=True)),
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "dtype": "uint16" if len(tokenizer) <= 1 << 16 else "uint32",
        "validation_fraction": fraction,
        "split_by": split_by,
        "drop_duplicates": drop_duplicates,
        "tokens_per_shard": tokens_per_shard,
    }


def _watched(documents: Iterable[Document], drop_duplicates: bool, bar: tqdm) -> Iterator[_Read]:
    duplicates = DuplicateFilter()
    for number, document in enumerate(documents, start=1):
        try:
            digest = document_digest(document.text)
        except UnicodeEncodeError as error:
            raise DataError(
                f"Document {number} of {document.source} holds a lone surrogate (character {error.start}), which UTF-8 "
                f"cannot carry. Mend or remove the document."
            ) from error
        kept = bool(document.text) and not (drop_duplicates and duplicates.is_duplicate(digest))
        yield _Read(document, digest, kept)
        bar.update(len(document.text))
        if number % 1000 == 0:
            bar.set_postfix_str(f"{number:,} documents", refresh=False)


class _Preparation:
    """One call of `prepare`: the shards that stand, and the documents on their way into the next."""

    def __init__(self, data_dir: Path, tokenizer: PreTrainedTokenizerFast, settings: dict[str, Any]) -> None:
        self.data_dir = data_dir
        self.tokenizer = tokenizer
        self.settings = settings
        self.fingerprint = _hash(json.dumps(settings, sort_keys=True))
        self.indexes: list[ShardIndex] = []
        self.content = hashlib.blake2b(digest_size=16)
        self._start_shard()

    def run(self, reads: Iterator[_Read]) -> None:
        self.write(self.keep_standing_shards(reads))
        self.write(reads)
        if self.documents_read:
            self.write_shard()

    def keep_standing_shards(self, reads: Iterator[_Read]) -> list[_Read]:
        """Take over the shards on disk whose documents come again; return what was read past the last of them."""
        while True:
            name = self._next_name()
            try:
                index = ShardIndex.load(self.data_dir, name, self.settings["dtype"])
            except DataError:
                return []
            if index.fingerprint != self.fingerprint:
                return []
            before, pending = self.content.copy(), []
            # `pending` is the text of one shard: should it turn out changed, it cannot be read a second time.
            while len(pending) < index.documents_read and (read := next(reads, None)) is not None:
                pending.append(read)
                self._hash_in(read)
            if len(pending) < index.documents_read or self.content.hexdigest() != index.content:
                self.content = before
                return pending
            self.indexes.append(index)

    def write(self, reads: Iterable[_Read]) -> None:
        batch: list[_Read] = []
        chars = 0
        for read in reads:
            batch.append(read)
            chars += len(read.document.text)
            if chars >= _CHARS_PER_BATCH or len(batch) >= _DOCUMENTS_PER_BATCH:
                self._encode(batch)
                batch, chars = [], 0
        self._encode(batch)

    def finish(self) -> None:
        """Write the manifest, which makes the shards a set; nothing to do if it is the one that stands there.

        Raises:
            DataError: If there is nothing to train on or nothing to validate with; nothing is left behind then.
        """
        by_source: dict[str, SourceReport] = {}
        for index in self.indexes:
            for source, counts in index.report.items():
                by_source[source] = by_source.get(source, SourceReport()) + counts
        if complaint := self._complaint(sum(counts.documents for counts in by_source.values())):
            if self.indexes:  # made by this call: an earlier set stands untouched as long as nothing replaced it
                self._remove_from(0)
            raise DataError(complaint)
        content = self.content.hexdigest()
        manifest = {
            "fingerprint": _hash(self.fingerprint + content),
            "settings_fingerprint": self.fingerprint,
            "content": content,
            "settings": self.settings,
            "shards": [index.name for index in self.indexes],
            "by_source": {source: asdict(counts) for source, counts in sorted(by_source.items())},
        }
        text = json.dumps(manifest, indent=2) + "\n"
        path = self.data_dir / MANIFEST
        if not path.exists() or path.read_text("utf-8") != text:
            self._remove_from(len(self.indexes))
            _write(path, text.encode())

    def _complaint(self, num_documents: int) -> str:
        if not num_documents:
            return "There is no document in the data. Check the path and the column that holds the text."
        fraction = self.settings["validation_fraction"]
        found = np.unique(np.concatenate([index.split for index in self.indexes]))
        missing = [name for split, name in ((TRAIN, "training"), (VALIDATION, "validation")) if split not in found]
        if not missing or fraction == 0:
            return ""
        return (
            f"None of the documents ({num_documents}) falls into the {missing[0]} split with validation_fraction "
            f"{fraction:g}. Set split_by to 'tail', which holds out the end of each document, or change the fraction."
        )

    def write_shard(self) -> None:
        name = self._next_name()
        self._remove_from(len(self.indexes))
        tokens = np.concatenate([np.empty(0, self.settings["dtype"]), *self.tokens]).tobytes()
        index = ShardIndex(
            name=name,
            fingerprint=self.fingerprint,
            content=self.content.hexdigest(),
            documents_read=self.documents_read,
            lengths=np.array([len(t) for t in self.tokens], dtype=np.int64),
            bytes=np.array(self.bytes, dtype=np.int64),
            split=np.array(self.split, dtype=np.uint8),
            source=np.array(self.source, dtype=np.int32),
            report={source: SourceReport(**counts) for source, counts in self.counts.items()},
        )
        _write(self.data_dir / f"{name}.bin", lambda stream: stream.write(tokens))
        # The index is what makes the shard count, so it comes after the tokens.
        _write(self.data_dir / f"{name}.npz", _index_bytes(index))
        self.indexes.append(index)
        self._start_shard()

    def _start_shard(self) -> None:
        self.tokens: list[np.ndarray] = []
        self.bytes: list[int] = []
        self.split: list[int] = []
        self.source: list[int] = []
        self.counts: dict[str, Counter[str]] = {}
        self.documents_read = self.num_tokens = 0

    def _next_name(self) -> str:
        return f"shard-{len(self.indexes):05d}"

    def _hash_in(self, read: _Read) -> None:
        self.content.update(read.digest + read.document.source.encode("utf-8", "surrogateescape") + b"\0")

    def _encode(self, batch: list[_Read]) -> None:
        pieces = [(i, text, split) for i, read in enumerate(batch) for text, split in self._split(read)]
        encoded = encode_documents(self.tokenizer, [text for _, text, _ in pieces])
        end = np.array([self.settings["eos_token_id"]], dtype=self.settings["dtype"])
        by_read: list[list[tuple[str, int, np.ndarray]]] = [[] for _ in batch]
        for (i, text, split), ids in zip(pieces, encoded, strict=True):
            by_read[i].append((text, split, np.append(np.array(ids, dtype=end.dtype), end)))
        for read, stored in zip(batch, by_read, strict=True):
            self._store(read, stored)
            if self.num_tokens >= self.settings["tokens_per_shard"]:
                self.write_shard()

    def _split(self, read: _Read) -> list[tuple[str, int]]:
        if not read.kept:
            return []
        text, fraction = read.document.text, self.settings["validation_fraction"]
        if self.settings["split_by"] == "tail":
            head, tail = split_tail(text, fraction)
            return [(part, split) for part, split in ((head, TRAIN), (tail, VALIDATION)) if part]
        return [(text, VALIDATION if digest_is_validation(read.digest, fraction) else TRAIN)]

    def _store(self, read: _Read, stored: list[tuple[str, int, np.ndarray]]) -> None:
        self._hash_in(read)
        self.documents_read += 1
        sizes = [len(text.encode("utf-8")) for text, _, _ in stored]
        num_tokens = sum(len(tokens) for _, _, tokens in stored)
        self.tokens += [tokens for _, _, tokens in stored]
        self.split += [split for _, split, _ in stored]
        self.bytes += sizes
        self.num_tokens += num_tokens
        counts = self.counts.setdefault(read.document.source, Counter())
        self.source += [list(self.counts).index(read.document.source)] * len(stored)
        counts["documents"] += int(read.kept)
        counts["tokens"] += num_tokens
        counts["bytes"] += sum(sizes)
        counts["duplicates_dropped"] += int(not read.kept and bool(read.document.text))
        counts["empty_dropped"] += int(not read.document.text)

    def _remove_from(self, shard: int) -> None:
        """Take away the manifest, then the shards from this one on: what remains is never taken for whole."""
        _remove([self.data_dir / MANIFEST])
        _remove(p for p in self.data_dir.glob("shard-*.*") if p.stem >= f"shard-{shard:05d}")


def _index_bytes(index: ShardIndex) -> bytes:
    meta = {
        "fingerprint": index.fingerprint,
        "content": index.content,
        "documents_read": index.documents_read,
        "report": {source: asdict(counts) for source, counts in index.report.items()},
    }
    buffer = io.BytesIO()
    encoded = np.frombuffer(json.dumps(meta).encode(), dtype=np.uint8)
    np.savez(
        buffer,
        meta=encoded,
        lengths=index.lengths,
        bytes=index.bytes,
        split=index.split,
        source=index.source,
    )
    return buffer.getvalue()


def _write(path: Path, content: bytes | Callable[[BinaryIO], object]) -> None:
    try:
        write_atomically(path, content)
    except OSError as error:
        if is_disk_full(error):
            raise DataError(
                f"The disk is full: {path} could not be written. Free some space and run the same command again; it "
                f"goes on after the shards that are finished."
            ) from error
        raise


def _remove(paths: Iterable[Path]) -> None:
    for path in list(paths):
        with suppress(FileNotFoundError):
            path.unlink()


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8"), digest_size=16).hexdigest()

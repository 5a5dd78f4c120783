"""Prepared data, as training reads it: token shards mapped into memory, with the bounds of every document.

A folder of prepared data holds `manifest.json`, written last, and for each shard a pair of files: `shard-00000.bin`,
the tokens of its documents one after another, each document ended by the end-of-text token; and `shard-00000.npz`, the
index: for each document its length, its UTF-8 bytes, the position of its source among the shard's sources, and whether
it trains (0) or validates (1). Where tokens are no labels, as a conversation's template and its questions are none,
`shard-00000.labels` holds a bit for each token of the shard, and the index how many bytes of each document are labels.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from tercet.training.documents import DataError
from tercet.training.skips import SkipReport

MANIFEST = "manifest.json"
LABELS_SUFFIX = ".labels"
TRAIN, VALIDATION = 0, 1


@dataclass(frozen=True)
class SourceReport:
    """What became of one source. A document that is split by its tail counts once here, and its bytes and tokens whole.

    Attributes:
        documents: Kept.
        tokens: Of the kept documents, each one's end-of-text token included.
        bytes: UTF-8 bytes of the kept documents.
        duplicates_dropped: Documents left out because an equal one came before.
        empty_dropped: Documents without a character.
    """

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    duplicates_dropped: int = 0
    empty_dropped: int = 0

    def __add__(self, other: "SourceReport") -> "SourceReport":
        theirs = asdict(other)
        return SourceReport(**{name: value + theirs[name] for name, value in asdict(self).items()})


@dataclass(frozen=True)
class PreparationReport(SourceReport):
    """The counts of all sources together, and of each under its name."""

    by_source: dict[str, SourceReport] = field(default_factory=dict)


class TokenSet:
    """The documents of one split. Tokens stay on disk until they are asked for; the index is in memory.

    Attributes:
        document_lengths: Stored tokens of each document, its end-of-text included, int64 (documents,).
        document_bytes: UTF-8 bytes of each document's text, int64 (documents,).
        document_label_bytes: Of them, those that labels stand for: of a conversation, what the assistant says.
        document_sources: Position in `sources` of each document's source, int32 (documents,).
        sources: Labels of the sources, sorted.
    """

    def __init__(self, data_dir: Path, dtype: str, indexes: "list[ShardIndex]", split: int) -> None:
        chosen = [index.split == split for index in indexes]
        self.document_lengths = _joined([index.lengths[c] for index, c in zip(indexes, chosen, strict=True)])
        self.document_bytes = _joined([index.bytes[c] for index, c in zip(indexes, chosen, strict=True)])
        self.sources = sorted({source for index in indexes for source in index.report})
        positions = [np.array([self.sources.index(s) for s in index.report], np.int64) for index in indexes]
        self.document_label_bytes = _joined(
            [
                (index.bytes if index.label_bytes is None else index.label_bytes)[c]
                for index, c in zip(indexes, chosen, strict=True)
            ]
        )
        self.document_sources = _joined(
            [p[index.source[c]] for p, index, c in zip(positions, indexes, chosen, strict=True)], np.int32
        )
        starts = [np.cumsum(index.lengths) - index.lengths for index in indexes]
        self._starts = _joined([s[c] for s, c in zip(starts, chosen, strict=True)])
        self._shard = np.repeat(np.arange(len(indexes), dtype=np.int32), [int(c.sum()) for c in chosen])
        self._paths = [data_dir / f"{index.name}.bin" for index in indexes]
        self._label_paths = [
            data_dir / f"{index.name}{LABELS_SUFFIX}" if index.has_labels else None for index in indexes
        ]
        self._dtype = np.dtype(dtype)
        self._map()

    def _map(self) -> None:
        # A memmap's own slicing costs microseconds; a plain array over the same pages does not.
        self._tokens = [
            np.asarray(np.memmap(path, dtype=self._dtype, mode="r"))
            if path.stat().st_size  # an empty file cannot be mapped: a shard of nothing but dropped documents
            else np.empty(0, self._dtype)
            for path in self._paths
        ]
        self._labels = [
            None if path is None else np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
            for path in self._label_paths
        ]

    def __getstate__(self) -> dict[str, Any]:
        """Workers of a data loader map the files themselves; pickling the arrays would copy the corpus."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_tokens", "_labels")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._map()

    @property
    def num_documents(self) -> int:
        """Documents in this split."""
        return len(self.document_lengths)

    @property
    def num_tokens(self) -> int:
        """Stored tokens, the end-of-text tokens included."""
        return int(self.document_lengths.sum())

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of the text; an end-of-text token stands for none."""
        return int(self.document_bytes.sum())

    @property
    def num_label_bytes(self) -> int:
        """UTF-8 bytes of the text that labels stand for; all of it but where conversations are."""
        return int(self.document_label_bytes.sum())

    def tokens(self, document: int, start: int, stop: int) -> np.ndarray:
        """Stored tokens start <= t < stop of a document: a read-only view, uint16 or uint32, (stop - start,).

        Raises:
            IndexError: If the document has no such tokens; a view must not run into its neighbour.
        """
        first = self._first(document, start, stop)
        return self._tokens[self._shard[document]][first : first + stop - start]

    @property
    def has_label_masks(self) -> bool:
        """Whether some tokens are no labels; if not, `label_mask` is None for every document."""
        return any(path is not None for path in self._label_paths)

    def label_mask(self, document: int, start: int, stop: int) -> np.ndarray | None:
        """Which of `tokens(document, start, stop)` are labels, bool (stop - start,); None says all of them.

        Of a conversation, the tokens that the model itself is to write are; the end-of-text token behind it is none.

        Raises:
            IndexError: If the document has no such tokens.
        """
        first = self._first(document, start, stop)
        labels = self._labels[self._shard[document]]
        if labels is None:
            return None
        last = first + stop - start
        bits = np.unpackbits(labels[first // 8 : -(-last // 8)])
        return bits[first % 8 : first % 8 + stop - start].astype(bool)

    def _first(self, document: int, start: int, stop: int) -> int:
        """Place of a document's token `start` in its shard."""
        if not 0 <= start <= stop <= self.document_lengths[document]:
            raise IndexError(
                f"Document {document} has {self.document_lengths[document]} tokens; [{start}, {stop}) is not within."
            )
        return self._starts[document] + start


@dataclass(frozen=True)
class ShardIndex:
    """What the .npz beside a shard's tokens holds.

    Attributes:
        name: File name without suffix.
        fingerprint: Of the settings that made it (tokenizer, split), hexadecimal.
        content: Hash over all documents up to the end of this shard, hexadecimal.
        documents_read: Documents this shard consumed, the dropped ones included.
        lengths, bytes, split: int64, int64, uint8, each (stored documents,).
        source: Position of each document's source in `report`, int32 (stored documents,).
        report: Counts of this shard by source.
        label_bytes: Of `bytes`, those that labels stand for, int64 (stored documents,); None: all.
        has_labels: Whether a .labels file says which of its tokens are labels; otherwise all are.
    """

    name: str
    fingerprint: str
    content: str
    documents_read: int
    lengths: np.ndarray
    bytes: np.ndarray
    split: np.ndarray
    source: np.ndarray
    report: dict[str, SourceReport]
    has_labels: bool = False
    label_bytes: np.ndarray | None = None

    @classmethod
    def load(cls, data_dir: Path, name: str, dtype: str) -> Self:
        """Read an index and hold it against its tokens.

        Raises:
            DataError: If the index is missing or unreadable, or the tokens are not as many as it says.
        """
        path, tokens = data_dir / f"{name}.npz", data_dir / f"{name}.bin"
        try:
            with np.load(path) as arrays:
                meta = json.loads(arrays["meta"].tobytes())
                names = ("lengths", "bytes", "split", "source", *(["label_bytes"] if meta.get("has_labels") else []))
                columns = {column: arrays[column] for column in names}
            size = tokens.stat().st_size
            num_tokens = int(columns["lengths"].sum())
            label_bytes = tokens.with_suffix(LABELS_SUFFIX).stat().st_size if meta.get("has_labels") else None
        except Exception as error:  # zipfile, zlib, json and numpy each have their own for a torn file
            raise DataError(f"{path} or its tokens cannot be read: {error}. Prepare the data again.") from error
        expected = num_tokens * np.dtype(dtype).itemsize
        if size != expected:
            raise DataError(f"{tokens} has {size} bytes where its index says {expected}. Prepare the data again.")
        if label_bytes is not None and label_bytes != -(-num_tokens // 8):
            raise DataError(
                f"{tokens.with_suffix(LABELS_SUFFIX)} has {label_bytes} bytes where its index says "
                f"{-(-num_tokens // 8)}. Prepare the data again."
            )
        report = {source: SourceReport(**counts) for source, counts in meta.pop("report").items()}
        return cls(name=name, report=report, **columns, **meta)


@dataclass(frozen=True)
class PreparedData:
    """A whole set of prepared data.

    Attributes:
        train: Documents to learn from.
        validation: Documents held out; none where the validation fraction is 0.
        report: What was kept and what was dropped.
        fingerprint: Stands for tokenizer, documents and split together: equal exactly if all of them are.
        settings: What made the set, as the manifest has it.
        skips: Rows that reading left out, by source and reason; none of them is in the report's counts.
        corpus: Hash over all documents that were read, other parts' too; only of a part, None otherwise.
    """

    train: TokenSet
    validation: TokenSet
    report: PreparationReport
    fingerprint: str
    settings: dict[str, Any]
    skips: SkipReport = field(default_factory=SkipReport)
    corpus: str | None = None

    @classmethod
    def open(cls, data_dir: Path) -> Self:
        """Open the set that `prepare` made in this folder.

        Raises:
            DataError: If there is no finished set, or one of its files is missing or cut short.
        """
        data_dir = Path(data_dir)
        manifest = read_manifest(data_dir)
        settings = manifest["settings"]
        indexes = [ShardIndex.load(data_dir, name, settings["dtype"]) for name in manifest["shards"]]
        if any(index.fingerprint != manifest["settings_fingerprint"] for index in indexes):
            raise DataError(f"{data_dir} holds shards that its manifest does not know. Prepare the data again.")
        by_source = {source: SourceReport(**counts) for source, counts in manifest["by_source"].items()}
        total = sum(by_source.values(), SourceReport())
        return cls(
            train=TokenSet(data_dir, settings["dtype"], indexes, TRAIN),
            validation=TokenSet(data_dir, settings["dtype"], indexes, VALIDATION),
            report=PreparationReport(**asdict(total), by_source=by_source),
            fingerprint=manifest["fingerprint"],
            settings=settings,
            skips=SkipReport.from_dict(manifest.get("skipped", {})),
            corpus=manifest.get("corpus"),
        )


def read_manifest(data_dir: Path) -> dict[str, Any]:
    """The manifest of a finished set, as it was written.

    Raises:
        DataError: If there is none, or it is no manifest that this version writes.
    """
    path = data_dir / MANIFEST
    try:
        manifest = json.loads(path.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DataError(
            f"{data_dir} holds no finished prepared data: {MANIFEST} is missing. Prepare it; what is done is kept."
        ) from error
    except ValueError as error:
        raise DataError(f"{path} is no JSON: {error}. Prepare the data again.") from error
    needed = ("fingerprint", "settings_fingerprint", "settings", "shards", "by_source")
    if not isinstance(manifest, dict) or (missing := [key for key in needed if key not in manifest]):
        what = f"lacks {', '.join(missing)}" if isinstance(manifest, dict) else "is no object"
        raise DataError(f"{path} is no manifest of prepared data: it {what}. Prepare the data again.")
    return manifest


def differing_settings(data_dir: Path, settings: dict[str, Any]) -> list[str]:
    """Names of the settings in which the finished set that stands there is another; none if there is no such set."""
    try:
        held = read_manifest(data_dir)["settings"]
    except DataError:
        return []  # none, or one that is damaged and made anew
    return [key for key in sorted({*held, *settings}) if held.get(key) != settings.get(key)]


def _joined(arrays: list[np.ndarray], dtype: type[np.signedinteger] = np.int64) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype), *(array.astype(dtype, copy=False) for array in arrays)])

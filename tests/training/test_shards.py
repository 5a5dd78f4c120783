import copy
import errno
import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tokenizers import normalizers
from transformers import PreTrainedTokenizerFast

from tercet.tokenizer import encode_documents, train_tokenizer
from tercet.training import encode_worker
from tercet.training.documents import DataError, Document
from tercet.training.shards import PreparedData, TokenSet, prepare
from tercet.training.skips import SkipReport

TEXTS = [f"Document {i}: " + "word " * (i % 40) + "é🙂\r\n" for i in range(300)]
DOCUMENTS = [Document(text, "even" if i % 2 == 0 else "odd") for i, text in enumerate(TEXTS)]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(TEXTS, 290)


def prepared(documents, tokenizer, data_dir: Path, **changes) -> PreparedData:
    settings = {"validation_fraction": 0.1, "split_by": "document", "drop_duplicates": True, "tokens_per_shard": 2000}
    return prepare(documents, tokenizer, data_dir, progress=False, **{**settings, **changes})


def files(data_dir: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in data_dir.iterdir()}


def stored(tokens: TokenSet) -> list[list[int]]:
    return [tokens.tokens(d, 0, int(n)).tolist() for d, n in enumerate(tokens.document_lengths)]


def test_every_document_is_its_tokens_and_the_end_of_text(tmp_path: Path, tokenizer):
    data = prepared(DOCUMENTS, tokenizer, tmp_path)
    expected = [[*ids, tokenizer.eos_token_id] for ids in encode_documents(tokenizer, TEXTS)]
    assert sorted(stored(data.train) + stored(data.validation)) == sorted(expected)
    assert 10 < data.validation.num_documents < 60
    assert data.train.num_documents + data.validation.num_documents == len(TEXTS)
    assert data.train.num_bytes + data.validation.num_bytes == sum(len(t.encode()) for t in TEXTS)
    for tokens in (data.train, data.validation):
        assert tokens.num_tokens == tokens.document_lengths.sum()
        for document, ids in enumerate(stored(tokens)):
            text = tokenizer.decode(ids[:-1])
            assert tokens.document_bytes[document] == len(text.encode())
            assert tokens.sources[tokens.document_sources[document]] == DOCUMENTS[TEXTS.index(text)].source
    assert len(list(tmp_path.glob("*.bin"))) > 3


def test_the_report_counts_by_source(tmp_path: Path, tokenizer):
    extra = [Document(TEXTS[0], "odd"), Document("", "odd")]
    report = prepared([*DOCUMENTS, *extra], tokenizer, tmp_path).report
    assert (report.documents, report.duplicates_dropped, report.empty_dropped) == (300, 1, 1)
    assert report.bytes == sum(len(t.encode()) for t in TEXTS)
    assert report.tokens == sum(counts.tokens for counts in report.by_source.values())
    assert {s: c.documents for s, c in report.by_source.items()} == {"even": 150, "odd": 150}
    assert report.by_source["odd"].duplicates_dropped == 1
    kept = prepared([*DOCUMENTS, *extra], tokenizer, tmp_path / "all", drop_duplicates=False).report
    assert (kept.documents, kept.duplicates_dropped, kept.empty_dropped) == (301, 0, 1)


def test_a_tail_is_held_out_of_each_document(tmp_path: Path, tokenizer):
    text = "".join(TEXTS)
    data = prepared([Document(text, "long")], tokenizer, tmp_path, split_by="tail")
    head, tail = (tokenizer.decode(stored(tokens)[0][:-1]) for tokens in (data.train, data.validation))
    assert head + tail == text
    assert len(tail) == pytest.approx(0.1 * len(text), abs=1)
    assert data.validation.num_bytes == len(tail.encode())
    assert data.report.documents == 1


def test_the_end_of_text_in_a_text_is_text(tmp_path: Path, tokenizer):
    text = f"before {tokenizer.eos_token} after"
    data = prepared([Document(text, "x")], tokenizer, tmp_path, validation_fraction=0.0)
    assert stored(data.train)[0].count(tokenizer.eos_token_id) == 1
    assert data.validation.num_documents == 0
    assert data.validation.num_tokens == 0


@pytest.mark.parametrize(
    ("other", "kept"), [("one  two\n", 1), ("one two", 1), ("one two three", 2), ("o\u0308ne two", 2)]
)
def test_duplicates_but_for_white_space_go_where_that_is_asked_for(tmp_path: Path, tokenizer, other: str, kept: int):
    documents = [Document("one two", "x"), Document(other, "x")]
    settings = {"validation_fraction": 0.0, "drop_duplicates": "normalized"}
    data = prepared(documents, tokenizer, tmp_path, **settings)
    assert (data.report.documents, data.report.duplicates_dropped) == (kept, 2 - kept)
    exact = prepared(documents, tokenizer, tmp_path / "exact", validation_fraction=0.0)
    assert exact.report.documents == (1 if other == "one two" else 2)


def test_what_reading_left_out_stands_in_the_set(tmp_path: Path, tokenizer):
    skips = SkipReport()

    def read() -> Iterator[Document]:
        yield from DOCUMENTS
        skips.add("odd", "not_json", "odd.jsonl, line 7", 3)

    data = prepared(read(), tokenizer, tmp_path, skips=skips)
    assert data.skips.count("odd", "not_json") == 3
    assert "line 7" in "".join(data.skips.lines())
    assert prepared(DOCUMENTS, tokenizer, tmp_path / "none").skips.count() == 0
    assert "skipped" not in json.loads((tmp_path / "none" / "manifest.json").read_text())


def test_tokens_outside_a_document_are_refused(tmp_path: Path, tokenizer):
    train = prepared(DOCUMENTS, tokenizer, tmp_path).train
    with pytest.raises(IndexError):
        train.tokens(0, 0, int(train.document_lengths[0]) + 1)


def test_workers_map_the_files_instead_of_copying_them(tmp_path: Path, tokenizer):
    train = prepared(DOCUMENTS, tokenizer, tmp_path).train
    assert stored(pickle.loads(pickle.dumps(train))) == stored(train)
    assert train.tokens(0, 0, 1).dtype == np.uint16


@pytest.mark.parametrize("stop_at", [0, 1, 137, 299, 300])
def test_an_interrupted_preparation_goes_on_with_equal_bytes(tmp_path: Path, tokenizer, stop_at: int):
    def interrupted() -> Iterator[Document]:
        yield from DOCUMENTS[:stop_at]
        raise KeyboardInterrupt

    prepared(DOCUMENTS, tokenizer, tmp_path / "whole")
    data_dir = tmp_path / "parts"
    with pytest.raises(KeyboardInterrupt):
        prepared(interrupted(), tokenizer, data_dir)
    assert not list(data_dir.glob("*.writing"))
    with pytest.raises(DataError, match="no finished prepared data"):
        PreparedData.open(data_dir)
    times = {path: path.stat().st_mtime_ns for path in data_dir.glob("shard*")}
    assert bool(times) == (stop_at > 100)
    prepared(DOCUMENTS, tokenizer, data_dir)
    assert files(data_dir) == files(tmp_path / "whole")
    assert all(path.stat().st_mtime_ns == made for path, made in times.items())


def test_old_shards_and_new_ones_are_never_a_set(tmp_path: Path, tokenizer):
    """Text that has changed at its beginning, prepared again into the same folder and interrupted on the way."""
    before = prepared(DOCUMENTS, tokenizer, tmp_path)
    changed = [Document("changed", "even"), *DOCUMENTS[1:]]

    def interrupt(num_documents: int) -> None:
        def some() -> Iterator[Document]:
            yield from changed[:num_documents]
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            prepared(some(), tokenizer, tmp_path)

    interrupt(20)
    assert PreparedData.open(tmp_path).fingerprint == before.fingerprint  # no new shard is whole yet
    for num_documents in (150, 290):
        interrupt(num_documents)
        assert (tmp_path / "shard-00000.npz").is_file()
        with pytest.raises(DataError, match="no finished prepared data"):
            PreparedData.open(tmp_path)
    assert prepared(changed, tokenizer, tmp_path).fingerprint != before.fingerprint


def test_what_was_encoded_before_a_bad_document_is_kept(tmp_path: Path, tokenizer):
    bad = [*DOCUMENTS[:200], Document("a\ud800", "odd"), *DOCUMENTS[200:]]
    with pytest.raises(DataError, match="Document 201 of odd holds a lone surrogate"):
        prepared(bad, tokenizer, tmp_path)
    kept = files(tmp_path)
    assert len(kept) >= 4
    prepared(DOCUMENTS, tokenizer, tmp_path / "whole")
    assert kept.items() <= files(tmp_path / "whole").items()


def test_a_finished_set_is_not_made_again_but_read(tmp_path: Path, tokenizer, monkeypatch):
    first = prepared(DOCUMENTS, tokenizer, tmp_path)
    monkeypatch.setattr(encode_worker, "encode_pieces", lambda _, pieces, *__: pytest.fail(f"tokenized {pieces}"))
    with pytest.raises(pytest.fail.Exception):
        prepared(DOCUMENTS, tokenizer, tmp_path / "new")
    # What an earlier call of the tokenizer left in it does not change what documents become.
    tokenizer.backend_tokenizer.enable_truncation(5)
    try:
        assert prepared(iter(DOCUMENTS), tokenizer, tmp_path).fingerprint == first.fingerprint
    finally:
        tokenizer.backend_tokenizer.no_truncation()


@pytest.mark.parametrize("change", ["tokenizer", "text", "source", "fraction", "grown", "shrunk"])
def test_a_change_makes_the_set_that_would_be_made_from_scratch(tmp_path: Path, tokenizer, change: str):
    first = prepared(DOCUMENTS, tokenizer, tmp_path / "a")
    documents, settings = list(DOCUMENTS), {}
    if change == "tokenizer":
        tokenizer = train_tokenizer(TEXTS, 280)
    elif change == "text":
        documents[150] = Document("changed", "even")
    elif change == "source":
        documents[0] = Document(documents[0].text, "renamed")
    elif change == "fraction":
        settings = {"validation_fraction": 0.2}
    elif change == "grown":
        documents += [Document(f"new {i}", "new") for i in range(400)]
    else:
        documents = documents[:100]
    again = prepared(documents, tokenizer, tmp_path / "a", **settings)
    fresh = prepared(documents, tokenizer, tmp_path / "b", **settings)
    assert again.fingerprint == fresh.fingerprint != first.fingerprint
    assert stored(again.train) == stored(fresh.train)
    assert stored(again.validation) == stored(fresh.validation)
    assert again.report == fresh.report
    assert files(tmp_path / "a") == files(tmp_path / "b")


@pytest.mark.parametrize("content", ["{}", "[1]", '{"fingerprint": "0"}', "{", '"text"'])
def test_a_manifest_that_is_none_is_refused_and_made_anew(tmp_path: Path, tokenizer, content: str):
    prepared(DOCUMENTS, tokenizer, tmp_path)
    whole = files(tmp_path)
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(DataError, match=r"manifest\.json is no .*Prepare the data again") as caught:
        PreparedData.open(tmp_path)
    assert "\n" not in str(caught.value)
    prepared(DOCUMENTS, tokenizer, tmp_path)
    assert files(tmp_path) == whole


@pytest.mark.parametrize("damage", ["cut", "index", "missing"])
def test_a_damaged_set_is_refused_and_mended(tmp_path: Path, tokenizer, damage: str):
    prepared(DOCUMENTS, tokenizer, tmp_path)
    whole = files(tmp_path)
    victim = tmp_path / ("shard-00001.npz" if damage == "index" else "shard-00001.bin")
    if damage == "missing":
        victim.unlink()
    else:
        os.truncate(victim, victim.stat().st_size - 2)
    with pytest.raises(DataError, match=r"shard-00001.*Prepare the data again") as caught:
        PreparedData.open(tmp_path)
    assert "\n" not in str(caught.value)
    prepared(DOCUMENTS, tokenizer, tmp_path)
    assert files(tmp_path) == whole


def test_a_full_disk_is_one_line_and_leaves_no_half_file(tmp_path: Path, tokenizer, monkeypatch):
    calls = 0

    def fsync(_: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(DataError, match=r"The disk is full: .*shard-00001\.npz could not be written\. Free some space"):
        prepared(DOCUMENTS, tokenizer, tmp_path)
    assert sorted(files(tmp_path)) == ["shard-00000.bin", "shard-00000.npz", "shard-00001.bin"]
    monkeypatch.undo()
    assert prepared(DOCUMENTS, tokenizer, tmp_path).report.documents == 300


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, which Linux has")
def test_a_disk_that_fills_amid_a_shard_is_one_line(tmp_path: Path, tokenizer, monkeypatch):
    def full(handle: int, *_: object, **__: object):
        os.close(handle)
        return Path("/dev/full").open("wb", buffering=64)

    monkeypatch.setattr(os, "fdopen", full)
    with pytest.raises(DataError, match=r"The disk is full: .*shard-00000\.bin could not be written\. Free some space"):
        prepared(DOCUMENTS, tokenizer, tmp_path)
    assert files(tmp_path) == {}


def test_a_folder_of_something_else_keeps_its_files(tmp_path: Path, tokenizer):
    (tmp_path / "notes.txt").write_text("mine")
    prepared(DOCUMENTS, tokenizer, tmp_path)
    prepared(DOCUMENTS[:50], tokenizer, tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert json.loads((tmp_path / "manifest.json").read_text())["by_source"]["even"]["documents"] == 25


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([], "There is no document"),
        ([Document("", "x")], "There is no document"),
        ([Document("a\ud800", "x")], "Document 1 of x holds a lone surrogate"),
        (
            [Document("one text", "x")],
            r"None of the documents \(1\) falls into the validation split .* Set split_by",
        ),
        ([Document("just one", "x")], r"None of the documents \(1\) falls into the training split .* Set split_by"),
    ],
)
def test_what_cannot_be_prepared_gets_one_line_and_leaves_nothing(tmp_path: Path, tokenizer, documents, message: str):
    with pytest.raises(DataError, match=message) as caught:
        prepared(documents, tokenizer, tmp_path)
    assert "\n" not in str(caught.value)
    assert files(tmp_path) == {}


def test_a_source_that_turns_out_empty_does_not_cost_the_set_that_stands(tmp_path: Path, tokenizer):
    prepared(DOCUMENTS, tokenizer, tmp_path)
    with pytest.raises(DataError, match="There is no document"):
        prepared([], tokenizer, tmp_path)
    assert PreparedData.open(tmp_path).report.documents == 300


def test_a_tokenizer_without_an_end_is_refused(tmp_path: Path, tokenizer):
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(ValueError, match="eos_token"):
        prepared(DOCUMENTS, bare, tmp_path)


def test_a_tokenizer_that_normalizes_otherwise_is_another_one(tmp_path: Path, tokenizer):
    before = prepared([Document("TEXT in Capitals", "x")], tokenizer, tmp_path, validation_fraction=0.0)
    lower = copy.deepcopy(tokenizer)
    lower.backend_tokenizer.normalizer = normalizers.Lowercase()
    again = prepared([Document("TEXT in Capitals", "x")], lower, tmp_path, validation_fraction=0.0)
    assert again.fingerprint != before.fingerprint
    assert tokenizer.decode(stored(again.train)[0][:-1]) == "text in capitals"


def test_a_smaller_set_leaves_no_shard_of_the_larger_one(tmp_path: Path, tokenizer):
    for number in (5, 3):
        documents = [Document(f"text {i}", "x") for i in range(number)]
        prepared(documents, tokenizer, tmp_path, validation_fraction=0.0, tokens_per_shard=1)
        assert sorted(path.stem for path in tmp_path.glob("*.bin")) == [f"shard-{i:05d}" for i in range(number)]

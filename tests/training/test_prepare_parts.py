"""Parts prepared apart and joined are the set prepared in one go."""

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet.tokenizer import train_tokenizer
from tercet.training.documents import DataError, Document, Segment
from tercet.training.merge import merge
from tercet.training.shards import PreparedData, prepare
from tercet.training.skips import SkipReport
from tercet.training.split import document_digest, part_of
from tercet.training.token_set import TokenSet


def prepared(documents, tokenizer, data_dir: Path, **changes) -> PreparedData:
    settings = {"validation_fraction": 0.1, "split_by": "document", "drop_duplicates": True, "tokens_per_shard": 5000}
    return prepare(documents, tokenizer, data_dir, progress=False, **{**settings, **changes})


@pytest.fixture
def documents(small_corpus) -> list[Document]:
    texts = [text[:1500] for text in small_corpus]
    return [Document(text, "even" if i % 2 == 0 else "odd") for i, text in enumerate([*texts, *texts[:9], "", ""])]


@pytest.fixture
def parts(tmp_path: Path, small_tokenizer, documents) -> list[Path]:
    folders = [tmp_path / f"part{i}" for i in range(3)]
    for i, folder in enumerate(folders):
        prepared(documents, small_tokenizer, folder, part=(i, 3))
    return folders


def stored(tokens: TokenSet) -> list[tuple[list[int], int, str]]:
    """Each document's tokens, bytes and source, in an order of their own."""
    sources = [tokens.sources[number] for number in tokens.document_sources]
    ids = [tokens.tokens(document, 0, int(n)).tolist() for document, n in enumerate(tokens.document_lengths)]
    return sorted(zip(ids, tokens.document_bytes.tolist(), sources, strict=True))


def files(data_dir: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in data_dir.iterdir()}


def test_merged_parts_are_the_set_made_in_one_go(tmp_path: Path, small_tokenizer, documents, parts):
    whole = prepared(documents, small_tokenizer, tmp_path / "whole")
    held = [files(part) for part in parts]
    merged = merge([parts[2], parts[0], parts[1]], tmp_path / "merged")
    assert stored(merged.train) == stored(whole.train)
    assert stored(merged.validation) == stored(whole.validation)
    assert merged.report == whole.report
    assert merged.report.duplicates_dropped == len(documents) - 2 - (len({d.text for d in documents}) - 1) >= 9
    assert merged.report.empty_dropped == 2
    assert [files(part) for part in parts] == held
    alone = [PreparedData.open(part).report.documents for part in parts]
    assert sum(alone) == whole.report.documents
    assert min(alone) > 0.15 * whole.report.documents
    again = merge(parts, tmp_path / "again")
    assert files(tmp_path / "again") == files(tmp_path / "merged")
    assert again.fingerprint == merged.fingerprint


texts_of_documents = st.lists(st.sampled_from(["a", "a ", "b", "cc", "d d", "", "e\n", "e"]), min_size=1, max_size=30)


@settings(max_examples=12, deadline=None)
@given(texts_of_documents, st.integers(1, 4), st.sampled_from([True, False, "normalized"]))
def test_any_documents_in_any_number_of_parts(tmp_path_factory, small_tokenizer, texts, num_parts, drop):
    folder = tmp_path_factory.mktemp("parts")
    documents = [Document(f"{text}", "x" if i % 3 else "y") for i, text in enumerate(texts)]
    # A document of its own in each part, so that none is empty.
    documents += [Document(f"filler {i}", "filler") for i in range(40)]
    changes = {"drop_duplicates": drop, "validation_fraction": 0.0, "tokens_per_shard": 20}
    whole = prepared(documents, small_tokenizer, folder / "whole", **changes)
    names = [folder / f"{i}" for i in range(num_parts)]
    for i, name in enumerate(names):
        prepared(documents, small_tokenizer, name, part=(i, num_parts), **changes)
    merged = merge(names, folder / "merged")
    assert stored(merged.train) == stored(whole.train)
    assert merged.report == whole.report
    shutil.rmtree(folder)


def test_a_merged_set_is_taken_as_it_is_by_the_next_preparation(tmp_path: Path, small_tokenizer, parts, small_corpus):
    merged = merge(parts, tmp_path / "merged")
    taken = prepared(iter(()), small_tokenizer, tmp_path / "merged")
    assert taken.fingerprint == merged.fingerprint
    with pytest.raises(DataError, match=r"merged from parts with other settings \(different: validation_fraction\)"):
        prepared(iter(()), small_tokenizer, tmp_path / "merged", validation_fraction=0.2)
    other = train_tokenizer(small_corpus, 300)
    with pytest.raises(DataError, match="tokenizer"):
        prepared(iter(()), other, tmp_path / "merged")
    assert PreparedData.open(tmp_path / "merged").fingerprint == merged.fingerprint


def test_a_part_goes_on_where_it_was_stopped(tmp_path: Path, small_tokenizer, documents, parts):
    def stopped():
        yield from documents[:60]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepared(stopped(), small_tokenizer, tmp_path / "again", part=(1, 3), tokens_per_shard=5000)
    prepared(documents, small_tokenizer, tmp_path / "again", part=(1, 3))
    assert files(tmp_path / "again") == files(parts[1])


def test_what_reading_left_out_counts_once(tmp_path: Path, small_tokenizer, documents):
    for i in range(2):
        skips = SkipReport()
        skips.add("odd", "not_json", "line 7")
        prepared(documents, small_tokenizer, tmp_path / f"{i}", part=(i, 2), skips=skips)
    assert merge([tmp_path / "0", tmp_path / "1"], tmp_path / "merged").skips.count() == 1


def _other_tokenizer(documents, tokenizer, folder: Path) -> None:
    prepared(documents, train_tokenizer([d.text for d in documents], 300), folder, part=(1, 3))


def _other_settings(documents, tokenizer, folder: Path) -> None:
    prepared(documents, tokenizer, folder, part=(1, 3), validation_fraction=0.2)


def _other_division(documents, tokenizer, folder: Path) -> None:
    prepared(documents, tokenizer, folder, part=(1, 2))


def _other_documents(documents, tokenizer, folder: Path) -> None:
    prepared([*documents, Document("one that came later", "even")], tokenizer, folder, part=(1, 3))


def _whole_set(documents, tokenizer, folder: Path) -> None:
    prepared(documents, tokenizer, folder)


def _unfinished(documents, tokenizer, folder: Path) -> None:
    prepared(documents, tokenizer, folder, part=(1, 3))
    (folder / "manifest.json").unlink()


def _cut_short(documents, tokenizer, folder: Path) -> None:
    prepared(documents, tokenizer, folder, part=(1, 3))
    (folder / "shard-00000.bin").write_bytes(b"")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_other_tokenizer, "another tokenizer than"),
        (_other_settings, r"different settings: validation_fraction 0\.2 and 0\.1"),
        (_other_division, "is a part of 2, and .* of 3"),
        (_other_documents, "cut from different documents"),
        (_whole_set, "is no part of a set"),
        (_unfinished, "no finished prepared data"),
        (_cut_short, r"shard-00000\.bin has 0 bytes"),
    ],
)
def test_what_is_no_part_of_the_set_is_refused(tmp_path: Path, small_tokenizer, documents, parts, make, message):
    make(documents, small_tokenizer, tmp_path / "strange")
    with pytest.raises(DataError, match=message) as caught:
        merge([parts[0], tmp_path / "strange", parts[2]], tmp_path / "merged")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "merged" / "manifest.json").exists()


def test_all_parts_must_be_there_once(tmp_path: Path, parts):
    with pytest.raises(DataError, match="1 of 3 parts is missing: 1/3"):
        merge([parts[0], parts[2]], tmp_path / "merged")
    with pytest.raises(DataError, match="Part 0 of 3 is given twice"):
        merge([*parts, parts[0]], tmp_path / "merged")
    with pytest.raises(DataError, match="no part to merge"):
        merge([], tmp_path / "merged")


def test_a_merge_does_not_replace_another_set(tmp_path: Path, small_tokenizer, documents, parts):
    for folder in (parts[1], tmp_path / "whole"):
        prepared(documents, small_tokenizer, folder, part=(1, 3) if folder is parts[1] else None)
        held = files(folder)
        with pytest.raises(DataError, match="holds another set"):
            merge(parts, folder)
        assert files(folder) == held


def test_a_stopped_merge_is_no_set_and_is_made_good(tmp_path: Path, parts, monkeypatch):
    merge(parts, tmp_path / "whole")
    calls = 0

    def copy(*arguments: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        copyfileobj(*arguments)

    copyfileobj = shutil.copyfileobj
    monkeypatch.setattr(shutil, "copyfileobj", copy)
    with pytest.raises(KeyboardInterrupt):
        merge(parts, tmp_path / "merged")
    with pytest.raises(DataError, match="no finished prepared data"):
        PreparedData.open(tmp_path / "merged")
    monkeypatch.undo()
    merge(parts, tmp_path / "merged")
    assert files(tmp_path / "merged") == files(tmp_path / "whole")


@pytest.mark.parametrize("part", [(2, 2), (-1, 2), (0, 0)])
def test_a_part_that_is_none_is_refused(tmp_path: Path, small_tokenizer, documents, part):
    with pytest.raises(ValueError, match="part must be"):
        prepared(documents, small_tokenizer, tmp_path, part=part)


def test_a_part_without_a_document_says_so(tmp_path: Path, small_tokenizer):
    documents = [Document("one text", "x")]
    empty = 1 - part_of(document_digest("one text"), 2)
    with pytest.raises(DataError, match=f"No document falls into part {empty} of 2"):
        prepared(documents, small_tokenizer, tmp_path, part=(empty, 2))
    assert files(tmp_path) == {}


def test_a_part_is_marked_as_one(parts):
    manifest = json.loads((parts[1] / "manifest.json").read_text())
    assert manifest["settings"]["part"] == [1, 3]
    assert PreparedData.open(parts[0]).corpus == PreparedData.open(parts[1]).corpus is not None


def parts_of(documents, tokenizer, folder: Path, **settings) -> list[Path]:
    """Two parts."""
    for i in range(2):
        prepared(documents, tokenizer, folder / f"part{i}", part=(i, 2), **settings)
    return [folder / "part0", folder / "part1"]


def test_merged_conversations_keep_their_labels(tmp_path: Path, small_tokenizer):
    chats = []
    for i in range(9):
        segments = (Segment(f"Ask {i}?", False, False), Segment(f"Reply {i}.", False, True))
        chats.append(Document("".join(segment.text for segment in segments), "chat", segments))
    together = prepared(chats, small_tokenizer, tmp_path / "whole", validation_fraction=0.0).train
    merged = merge(parts_of(chats, small_tokenizer, tmp_path, validation_fraction=0.0), tmp_path / "merged").train

    def learned(tokens: TokenSet) -> list[tuple[list[int], list[bool]]]:
        found = []
        for document, length in enumerate(tokens.document_lengths.tolist()):
            mask = tokens.label_mask(document, 0, length)
            assert mask is not None
            found.append((tokens.tokens(document, 0, length).tolist(), mask.tolist()))
        return sorted(found)

    assert learned(merged) == learned(together)
    assert merged.num_label_bytes == together.num_label_bytes == sum(len(f"Reply {i}.") for i in range(9))


def test_a_stopped_merge_over_an_older_set_leaves_no_manifest(tmp_path: Path, parts, monkeypatch):
    """Which would stand for shards of which some are new."""
    merge(parts, tmp_path / "merged")
    copyfileobj, calls = shutil.copyfileobj, []

    def copy(*arguments: object) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        copyfileobj(*arguments)

    monkeypatch.setattr(shutil, "copyfileobj", copy)
    with pytest.raises(KeyboardInterrupt):
        merge(parts, tmp_path / "merged")
    with pytest.raises(DataError, match="no finished prepared data"):
        PreparedData.open(tmp_path / "merged")


def test_shards_of_another_set_in_a_part_are_noticed(tmp_path: Path, small_tokenizer, documents):
    parts = parts_of(documents, small_tokenizer, tmp_path)
    prepared(documents, small_tokenizer, tmp_path / "strange")
    for suffix in (".bin", ".npz"):
        shutil.copy(tmp_path / "strange" / f"shard-00000{suffix}", parts[1])
    with pytest.raises(DataError, match="part1 holds shards that its manifest does not know"):
        merge(parts, tmp_path / "merged")


def test_parts_that_hold_nothing_out_between_them_say_so(tmp_path: Path, small_tokenizer):
    documents = [Document(f"text {i}", "x") for i in range(20)]
    parts = parts_of(documents, small_tokenizer, tmp_path, validation_fraction=1e-6)
    with pytest.raises(DataError, match="None of the documents falls into the validation split"):
        merge(parts, tmp_path / "merged")
    assert files(tmp_path / "merged") == {}

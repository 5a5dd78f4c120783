import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.tokenizer import train_tokenizer
from tercet.training.data_info import describe_data, length_histogram, row_fill, stored_lengths
from tercet.training.data_picture import plot_data
from tercet.training.documents import DataError, Document
from tercet.training.packing import concatenate, pack
from tercet.training.shards import PreparedData, prepare
from tercet.training.skips import SkipReport


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory, small_corpus, small_tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("info") / "data"
    documents = [
        Document(text[: 300 * (1 + i % 9)], "even" if i % 2 == 0 else "odd") for i, text in enumerate(small_corpus)
    ]
    skips = SkipReport()
    skips.add("odd", "not_json", "odd.jsonl, line 7 is not JSON", 3)
    prepare(
        [*documents, documents[0], Document("", "odd")], small_tokenizer, folder, validation_fraction=0.1,
        split_by="document", drop_duplicates=True, progress=False, skips=skips,
    )  # fmt: skip
    return folder


@given(st.lists(st.integers(1, 1 << 40), max_size=50))
def test_every_document_is_in_the_bin_of_its_length(lengths: list[int]):
    histogram = length_histogram(np.array(lengths, dtype=np.int64))
    assert histogram.tokens.sum() == sum(lengths)
    for first, documents in zip(histogram.first.tolist(), histogram.documents.tolist(), strict=True):
        assert documents == sum(first <= length < 2 * first for length in lengths)
    assert histogram.documents.sum() == len(lengths)


def test_a_row_is_filled_with_whole_documents_cut_ones_and_padding():
    lengths = np.array([10, 3, 3])
    fill = row_fill(lengths, pack(lengths, 8))  # 8 of the first alone, its other 2 with both others
    assert (fill.num_rows, fill.whole, fill.cut, fill.padding) == (2, 6 / 16, 10 / 16, 0)
    fill = row_fill(lengths, concatenate(lengths, 12))
    assert (fill.num_rows, fill.whole, fill.cut) == (2, 13 / 24, 3 / 24)
    assert fill.padding == pytest.approx(8 / 24)


def test_the_description_says_what_the_set_holds(data_dir, small_tokenizer):
    data = PreparedData.open(data_dir)
    shown = "\n".join(describe_data(data_dir, tokenizer=small_tokenizer, sequence_length=128))
    report = data.report
    assert f"{report.documents:,} documents, {report.tokens:,} tokens, {report.bytes / 1e6:,.2f} MB" in shown
    num_ends = data.train.num_documents + data.validation.num_documents
    assert f"{report.bytes / (report.tokens - num_ends):.2f} bytes per token" in shown
    lines = [line.split() for line in shown.splitlines()]
    for name, counts in report.by_source.items():
        line = next(line for line in lines if line[:1] == [name])
        assert line[1:3] == [f"{counts.documents:,}", f"{counts.tokens:,}"]
        assert line[-2:] == [f"{counts.duplicates_dropped}", f"{counts.empty_dropped}"]
    assert "odd: 3 left out, not JSON" in shown
    assert "odd.jsonl, line 7" in shown
    assert f"longest {max(data.train.document_lengths.max(), data.validation.document_lengths.max()):,}" in shown


def test_the_row_shows_each_document_within_its_bounds(data_dir, small_tokenizer):
    data = PreparedData.open(data_dir)
    packing = pack(data.train.document_lengths, 1024)
    row = int(np.argmax(np.diff(packing.row_offsets)))
    shown = list(describe_data(data_dir, tokenizer=small_tokenizer, sequence_length=1024, row=row))
    heads = [line for line in shown if line.startswith("  ┌")]
    pieces = range(packing.row_offsets[row], packing.row_offsets[row + 1])
    assert len(heads) == len(pieces) > 2
    slot = 0
    for head, piece in zip(heads, pieces, strict=True):
        document, length = packing.document[piece], packing.length[piece]
        assert f"slots {slot:,} - {slot + length - 1:,}: document {document:,} of " in head
        slot += length
        start = int(packing.start[piece])
        text = small_tokenizer.decode(data.train.tokens(int(document), start, start + 5))
        assert shown[shown.index(head) + 1].startswith(f"  │ {text.splitlines()[0]}")
    assert sum(line.startswith("  └ end of text") for line in shown) >= len(pieces) - 1


def test_without_a_tokenizer_ids_are_shown(data_dir):
    data = PreparedData.open(data_dir)
    document = int(pack(data.train.document_lengths, 128).document[0])
    shown = "\n".join(describe_data(data_dir, sequence_length=128))
    assert f"│ {', '.join(map(str, data.train.tokens(document, 0, 5).tolist()))}" in shown


def test_what_cannot_be_shown_is_one_line(data_dir, small_corpus):
    with pytest.raises(DataError, match="There is no row 100000: rows are numbered from 0 to"):
        next(describe_data(data_dir, row=100_000))  # before the first line
    other = train_tokenizer(small_corpus, 300)
    with pytest.raises(DataError, match=r"another tokenizer \(1,024 tokens\) than this one \(300 tokens\)"):
        list(describe_data(data_dir, tokenizer=other))


def test_divided_documents_are_counted_once_and_said(small_corpus, small_tokenizer, tmp_path):
    documents = [Document(text[:2000], "text") for text in small_corpus[:14]]
    prepare(
        documents, small_tokenizer, tmp_path / "data", validation_fraction=0.1, split_by="tail", drop_duplicates=False,
        progress=False,
    )  # fmt: skip
    shown = list(describe_data(tmp_path / "data", sequence_length=64))
    assert "14 documents are divided, and counted below as two: what trains and what validates" in shown
    data = PreparedData.open(tmp_path / "data")
    part = data.validation.num_tokens / (data.validation.num_tokens + data.train.num_tokens)
    assert f"{part:.1%} of the tokens held out (asked for: 10.0%, by tail)" in shown[1]


def test_documents_that_stand_whole_are_not_said_to_be_divided(data_dir):
    shown = "\n".join(describe_data(data_dir))
    assert "divided" not in shown
    data = PreparedData.open(data_dir)
    assert length_histogram(stored_lengths(data)).documents.sum() == data.report.documents


def test_less_than_one_row_is_said(data_dir):
    last = list(describe_data(data_dir, sequence_length=10_000_000))[-1]
    assert "No rows to train on: The training text has" in last


def test_rows_are_those_that_the_recipe_trains_on(data_dir):
    lengths = PreparedData.open(data_dir).train.document_lengths
    for packing, rows in (("best_fit", pack(lengths, 128)), ("concatenate", concatenate(lengths, 128))):
        shown = "\n".join(describe_data(data_dir, sequence_length=128, packing=packing))
        assert f"{rows.num_rows:,} rows of 128 tokens" in shown
        assert f"{row_fill(lengths, rows).cut:.1%} pieces of cut ones" in shown
    mixed = list(describe_data(data_dir, sequence_length=128, weights={"even": 0.5, "odd": 0.5}))
    assert sum(line.startswith("Packed for training") for line in mixed) == 1


@pytest.mark.parametrize("sequence_length", [128, 10_000_000])
def test_the_picture_is_drawn_and_is_not_blank(data_dir, tmp_path, sequence_length):
    from matplotlib.image import imread

    path = tmp_path / "data.png"
    plot_data(PreparedData.open(data_dir), path, title="test", sequence_length=sequence_length)
    pixels = imread(io.BytesIO(path.read_bytes()))
    assert pixels.shape[:2] == (1120, 1600)
    for place in (pixels[:560], pixels[560:, :800], pixels[560:, 800:]):
        assert (place[..., :3] < 0.5).any()

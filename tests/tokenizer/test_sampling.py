"""A sample of a corpus is a function of its documents, within its budget, from all over it."""

import hashlib
import os
import random
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet.tokenizer.pretokenization import split_document, word_splitter
from tercet.tokenizer.sampling import MIN_SAMPLE_BYTES, TextSampler
from tercet.tokenizer.word_sketch import DistinctWords


def sample(texts, max_bytes=MIN_SAMPLE_BYTES, max_pieces=100_000):
    with TextSampler(max_bytes, max_pieces) as sampler:
        for text in texts:
            sampler.add(text)
        return list(sampler.pieces())


def by_definition(texts, max_bytes, max_pieces):
    """All pieces in the order of their hashes, up to the first that the budget has no room for."""
    pieces = [piece for text in texts if text for piece in split_document(text, max_bytes // 64, max_bytes // 32)]
    pieces.sort(key=lambda p: hashlib.blake2b(p.encode(), digest_size=8, person=b"tercet sample").digest())
    num_bytes = np.cumsum([len(piece.encode()) for piece in pieces])
    return pieces[: min(max_pieces, int((num_bytes <= max_bytes).sum()))]


documents = st.builds(
    lambda number, length, unit: f"{number} " + unit * length,
    st.integers(0, 30), st.integers(0, 900), st.sampled_from(["x", "né ", "中文。", "a\n", ""]),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(texts=st.lists(documents, max_size=80), max_pieces=st.integers(1, 120), shuffled=st.randoms())
def test_the_same_sample_in_any_order(texts, max_pieces, shuffled):
    expected = by_definition(texts, MIN_SAMPLE_BYTES, max_pieces)
    assert sample(texts, max_pieces=max_pieces) == expected
    shuffled.shuffle(texts)
    assert sample(texts, max_pieces=max_pieces) == expected


def test_taken_from_all_over_and_filled():
    texts = [f"{number} " + "word " * (number % 90) for number in range(20_000)]
    kept = sample(texts, max_bytes=400_000)
    assert 0.99 * 400_000 < sum(len(text) for text in kept) <= 400_000
    numbers = np.array([int(text.split()[0]) for text in kept])
    share = len(kept) / len(texts)
    for part in range(4):
        found = ((numbers // 5000) == part).sum()
        assert found == pytest.approx(5000 * share, rel=0.2)


def test_one_document_larger_than_the_budget_is_sampled_from_end_to_end():
    document = "".join(f"line {number} of many\n" for number in range(100_000))
    kept = sample([document], max_bytes=200_000)
    assert 0.9 * 200_000 < sum(map(len, kept)) <= 200_000
    places = sorted(document.index(piece) / len(document) for piece in kept)
    assert places[0] < 0.1 and places[-1] > 0.9
    assert all(piece.startswith(("line", " ")) for piece in kept), "cut inside a word"


def test_documents_are_cut_between_the_words_of_the_tokenizer(words):
    document = "".join(f"word{number}, (x\n of,(a) many\n" for number in range(8000))
    known = {document[start:end] for _, (start, end) in word_splitter(words).pre_tokenize_str(document)}
    with TextSampler(1 << 18, 100_000, words) as sampler:
        sampler.add(document)
        kept = list(sampler.pieces())
    assert len(kept) > 10
    assert {piece[a:b] for piece in kept for _, (a, b) in word_splitter(words).pre_tokenize_str(piece)} <= known


@pytest.mark.parametrize("unit", ["a", "中"])
def test_text_without_a_place_to_cut_is_cut(unit):
    kept = sample([unit * 2_000_000], max_bytes=100_000)
    assert 0.9 * 100_000 < sum(len(piece.encode()) for piece in kept) <= 100_000


def test_disk_and_memory_hold_twice_the_budget_at_most():
    generator = random.Random(0)
    with TextSampler(50_000, 300) as sampler:
        for number in range(20_000):
            sampler.add(f"{number} " + "x" * generator.randrange(400))
            assert os.fstat(sampler._file.fileno()).st_size <= 2 * 50_000 + 1000
            assert len(sampler._keys) <= 2 * 300
        counts = sampler.counts()
    assert counts.seen_pieces == 20_000 and not counts.is_whole
    assert 200 < counts.kept_pieces <= 300 and counts.kept_bytes <= 50_000


def test_more_text_after_a_look():
    with TextSampler(MIN_SAMPLE_BYTES, 100) as sampler:
        sampler.add("first")
        assert list(sampler.pieces()) == ["first"]
        assert sampler.counts().is_whole
        sampler.add("second")
        assert sorted(sampler.pieces()) == ["first", "second"]


@pytest.mark.parametrize(
    ("max_bytes", "max_pieces", "says"), [(100, 9, "max_bytes=100"), (1 << 20, 0, "max_documents=0")]
)
def test_a_budget_for_nothing_is_refused(max_bytes, max_pieces, says):
    with pytest.raises(ValueError, match=says):
        TextSampler(max_bytes, max_pieces)


def test_distinct_words_are_counted_once():
    generator = random.Random(0)
    words = ["".join(generator.choices("abcdefghij", k=generator.randrange(4, 12))) for _ in range(60_000)]
    distinct = {f" {word}" for word in words}
    sketch = DistinctWords()
    for _ in range(2):
        generator.shuffle(words)
        sketch.add(("\n " + " ".join(words)).encode())
        assert sketch.num_words == pytest.approx(len(distinct), rel=0.05)
        assert sketch.num_bytes == pytest.approx(sum(map(len, distinct)), rel=0.05)


def test_words_without_blanks_count_with_all_their_bytes():
    generator = random.Random(0)
    text = "".join(chr(0x4E00 + generator.randrange(5000)) for _ in range(100_000)).encode()
    sketch = DistinctWords()
    sketch.add(text)
    assert sketch.num_bytes == pytest.approx(len(text), rel=0.1)
    once = sketch.num_bytes
    sketch.add(text)
    assert sketch.num_bytes == once


def test_words_are_those_that_the_trainer_will_hold(words):
    """The memory that they are an estimate of is a promise."""
    generator = random.Random(0)
    parts = ["".join(generator.choices("abcdefgh", k=4)) for _ in range(300)]
    text = " ".join(f"{generator.choice(parts)}->{generator.choice(parts)}[{i}]," for i in range(60_000))
    held = {word for word, _ in word_splitter(words).pre_tokenize_str(text)}
    sketch = DistinctWords(words)
    sketch.add(text.encode())
    num_bytes = sum(map(len, held))  # a character each
    assert sketch.num_bytes == pytest.approx(num_bytes, rel=0.1, abs=20_000)


def test_one_word_of_millions_does_not_stand_for_all():
    sketch = DistinctWords()
    sketch.add(b"=" * 3_000_000)
    assert sketch.num_bytes <= 64 * 64


@pytest.mark.skipif(sys.platform == "win32", reason="needs limits of a process, which Unix has")
def test_a_file_that_cannot_grow_is_one_line_that_names_the_folder(tmp_path):
    """The sample lies in the folder of temporary files, which the user did not name and may not think of."""
    (tmp_path / "text.txt").write_text("a text of a few words, and a few more\n" * 20_000)
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000)); from tercet.cli import main"
    done = subprocess.run(
        [sys.executable, "-c", f"{limit}; main()", "tokenizer", "train", "text.txt", "--output", "out"],
        cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith(f"tercet: a file ({tmp_path}) became larger than this shell (ulimit -f)")
    assert done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_text_that_fills_the_budget_to_the_byte_is_whole():
    with TextSampler(MIN_SAMPLE_BYTES, 1000) as sampler:
        for i in range(MIN_SAMPLE_BYTES // 128):
            sampler.add(f"{i:0128d}")
        assert sampler.counts().is_whole

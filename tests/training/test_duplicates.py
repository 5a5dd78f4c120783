import hashlib
import unicodedata

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tercet.training import duplicates
from tercet.training.duplicates import DuplicateFilter, normalized_digest
from tercet.training.split import document_digest

plain_text = st.text(st.characters(exclude_categories=["Cs"]))
# Few values for the bytes that choose table and slot, so that digests meet in tables, slots and in all but one byte.
close_digests = st.lists(
    st.tuples(st.sampled_from([0, 1, 255]), st.integers(0, 300), st.sampled_from([0, 7])).map(
        lambda t: t[1].to_bytes(7, "little") + bytes([t[0], t[2]]) + bytes(7)
    ),
    max_size=400,
)


def test_equal_texts_are_known_again():
    seen = DuplicateFilter()
    assert [seen.is_duplicate(document_digest(text)) for text in ("a", "b", "a", "a ")] == [False, False, True, False]


@settings(max_examples=150, deadline=None)
@example([bytes(16), b"\1" + bytes(15), bytes(16)], 1 << 30)  # a key of 0 is like a free slot, and no other key
@given(close_digests, st.sampled_from([1 << 30, 33_000, 40_000]))
def test_it_answers_as_a_set_does_also_from_disk(digests: list[bytes], max_bytes: int):
    filtered, seen = DuplicateFilter(max_bytes=max_bytes), set()
    for digest in digests:
        assert filtered.is_duplicate(digest) == (digest in seen)
        seen.add(digest)


def test_many_digests_stay_within_the_bound_and_are_all_remembered(tmp_path):
    digests = [hashlib.blake2b(b"%d" % i, digest_size=16).digest() for i in range(30_000)]
    filtered = DuplicateFilter(max_bytes=100_000, spill_dir=tmp_path)
    for digest in digests:
        assert not filtered.is_duplicate(digest)
        assert filtered.nbytes <= 100_000
    assert all(filtered.is_duplicate(digest) for digest in digests)
    assert list(tmp_path.iterdir()) == []  # nothing for a killed process to leave behind


def test_a_digest_takes_16_bytes_at_most():
    filtered, random = DuplicateFilter(), np.random.default_rng(0)
    for row in random.integers(0, 256, (200_000, 16), dtype=np.uint8):
        filtered.is_duplicate(row.tobytes())
    assert filtered.nbytes <= 200_000 * 16


def test_a_disk_that_fills_is_one_line(monkeypatch):
    def full(*_: object, **__: object):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(duplicates.tempfile, "TemporaryFile", full)
    filtered = DuplicateFilter(max_bytes=33_000)
    digests = [document_digest(f"{i}") for i in range(10_000)]
    with pytest.raises(duplicates.DataError, match="The disk is full: the digests"):
        any(map(filtered.is_duplicate, digests))


@given(st.text(st.sampled_from("ab e\u0301é\n\t\u3000\u00a0"), max_size=60), st.integers(1, 9))
def test_normalized_is_nfc_with_single_spaces_whatever_the_chunks(text: str, chunk_chars: int):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(duplicates, "_CHUNK_CHARS", chunk_chars)
        found = normalized_digest(text)
    assert found == document_digest(" ".join(unicodedata.normalize("NFC", text).split()))


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (" one  two\r\n", True),
        ("one\ntwo", True),
        ("one\u00a0two", True),
        ("onetwo", False),
        ("One two", False),
        ("one two.", False),
    ],
)
def test_white_space_alone_makes_no_other_text(other: str, same: bool):
    assert (normalized_digest("one two") == normalized_digest(other)) is same


def test_a_composed_letter_is_the_same_letter():
    assert normalized_digest("caf\u00e9") == normalized_digest("cafe\u0301") != normalized_digest("cafe")


@pytest.mark.parametrize(("text", "other"), [("x2", "x\xb2"), ("file", "\ufb01le"), ("A", "\uff21")])
def test_texts_that_only_look_alike_are_not_one(text: str, other: str):
    """NFC, not NFKC: a square, a ligature and a wide letter are not what they are compatible with."""
    assert normalized_digest(text) != normalized_digest(other)

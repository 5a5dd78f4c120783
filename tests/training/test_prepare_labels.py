"""Conversations: what the template writes is special, and only the answers are labels."""

from pathlib import Path

import numpy as np
import pytest

from tercet.training.documents import DataError, Document, Segment
from tercet.training.shards import PreparedData, prepare
from tercet.training.token_set import TokenSet


def conversation(tokenizer, *turns: str) -> Document:
    """Questions and answers in turn, in a template of one special token each."""
    start = tokenizer.convert_ids_to_tokens(1 + tokenizer.eos_token_id)
    segments = []
    for i, turn in enumerate(turns):
        segments += [Segment(start, True, False), Segment(turn, False, i % 2 == 1)]
    return Document("".join(s.text for s in segments), "chat", tuple(segments))


@pytest.fixture
def documents(small_tokenizer) -> list[Document]:
    start = small_tokenizer.convert_ids_to_tokens(1 + small_tokenizer.eos_token_id)
    return [
        Document("Plain text before any conversation.", "text"),
        conversation(small_tokenizer, "What is it?", "A test of labels."),
        conversation(small_tokenizer, f"Say {start} aloud", f"{start} is text here", "And?", "x"),
        Document("Plain text behind.", "text"),
    ]


def prepared(documents, tokenizer, data_dir: Path, **changes) -> PreparedData:
    settings = {"validation_fraction": 0.0, "split_by": "document", "drop_duplicates": True, **changes}
    return prepare(documents, tokenizer, data_dir, progress=False, **settings)


def whole(tokens: TokenSet, document: int) -> tuple[list[int], np.ndarray | None]:
    length = int(tokens.document_lengths[document])
    return tokens.tokens(document, 0, length).tolist(), tokens.label_mask(document, 0, length)


def test_only_answers_are_labels(tmp_path: Path, small_tokenizer, documents):
    train = prepared(documents, small_tokenizer, tmp_path).train
    assert train.has_label_masks
    special = small_tokenizer.eos_token_id + 1
    for document, source in enumerate(documents):
        ids, mask = whole(train, document)
        assert mask is not None and mask.dtype == bool and len(mask) == len(ids)
        learned = small_tokenizer.decode([t for t, is_label in zip(ids, mask, strict=True) if is_label])
        if source.segments is None:
            assert mask.all()
        else:
            assert learned == "".join(s.text for s in source.segments if s.is_label)
            assert ids.count(special) == sum(s.is_template for s in source.segments)
            assert not mask[-1] and ids[-1] == small_tokenizer.eos_token_id
        assert small_tokenizer.decode(ids[:-1]) == source.text


def test_a_mask_of_a_part_is_the_part_of_the_mask(tmp_path: Path, small_tokenizer, documents):
    train = prepared(documents, small_tokenizer, tmp_path).train
    for document in range(train.num_documents):
        ids, mask = whole(train, document)
        assert mask is not None
        for start in range(len(ids)):
            for stop in (start, start + 1, len(ids)):
                part = train.label_mask(document, start, stop)
                assert part is not None and part.tolist() == mask[start:stop].tolist()
    with pytest.raises(IndexError):
        train.label_mask(0, 0, int(train.document_lengths[0]) + 1)


def test_plain_text_has_no_masks_and_no_file_of_them(tmp_path: Path, small_tokenizer, documents):
    train = prepared([documents[0], documents[3]], small_tokenizer, tmp_path).train
    assert not train.has_label_masks
    assert train.label_mask(0, 0, 3) is None
    assert not list(tmp_path.glob("*.labels"))


def test_masks_are_of_the_shards_that_need_them(tmp_path: Path, small_tokenizer, documents):
    train = prepared(documents, small_tokenizer, tmp_path, tokens_per_shard=1).train
    masks = [whole(train, document)[1] for document in range(4)]
    assert [mask is None for mask in masks] == [True, False, False, True]


def test_a_mask_cut_short_is_refused(tmp_path: Path, small_tokenizer, documents):
    prepared(documents, small_tokenizer, tmp_path)
    (tmp_path / "shard-00000.labels").write_bytes(b"\0")
    with pytest.raises(DataError, match=r"labels has 1 bytes where its index says"):
        PreparedData.open(tmp_path)


def test_other_labels_make_another_set(tmp_path: Path, small_tokenizer, documents):
    first = prepared(documents, small_tokenizer, tmp_path)
    segments = documents[1].segments
    assert segments is not None
    changed = Document(documents[1].text, "chat", tuple(Segment(s.text, s.is_template, True) for s in segments))
    again = prepared([documents[0], changed, *documents[2:]], small_tokenizer, tmp_path)
    assert again.fingerprint != first.fingerprint
    mask = whole(again.train, 1)[1]
    assert mask is not None and mask[:-1].all()


def test_the_end_of_a_conversation_cannot_be_held_out(tmp_path: Path, small_tokenizer, documents):
    with pytest.raises(DataError, match="Document 2 of chat is a conversation"):
        prepared(documents, small_tokenizer, tmp_path, split_by="tail", validation_fraction=0.1)


def test_the_name_of_a_special_token_is_another_text_than_the_token(tmp_path: Path, small_tokenizer):
    """The same characters, written by a user: more tokens, and another set."""
    written = conversation(small_tokenizer, "What is it?", "A test.")
    assert written.segments is not None
    said = (Segment(written.segments[0].text, False, False), *written.segments[1:])
    before = prepared([written], small_tokenizer, tmp_path)
    again = prepared([Document(written.text, "chat", said)], small_tokenizer, tmp_path)
    assert again.fingerprint != before.fingerprint
    assert again.train.num_tokens > before.train.num_tokens


def test_bytes_of_a_conversation_are_all_and_label_bytes_those_of_answers(tmp_path: Path, small_tokenizer):
    """Bits per byte divide by the latter: what the template writes is no text, also where it is a label."""
    start = small_tokenizer.convert_ids_to_tokens(1 + small_tokenizer.eos_token_id)
    answer, plain = "R\xe9ply", "plain \xe9"
    segments = (Segment("Ask?", False, False), Segment(answer, False, True), Segment(start, True, True))
    chat = Document("".join(segment.text for segment in segments), "chat", segments)
    data = prepared([chat, Document(plain, "text")], small_tokenizer, tmp_path)
    assert data.train.document_label_bytes.tolist() == [len(answer.encode()), len(plain.encode())]
    by_source = {name: counts.bytes for name, counts in data.report.by_source.items()}
    assert by_source == {"chat": len(chat.text.encode()), "text": len(plain.encode())}

"""What a stream hands to training is what preparing the same text would: each document once an epoch, none held out."""

import json
from collections import Counter
from itertools import cycle
from pathlib import Path

import pytest
from streamed_runs import (
    FRACTION,
    batches_of,
    begin,
    distinct_texts,
    documents_of,
    texts_of_a_rank,
    trained_texts,
    write_shards,
)

from tercet.training.documents import DataError
from tercet.training.preparation import make_data
from tercet.training.recipe import RecipeError, recipe_from_fields
from tercet.training.split import is_validation
from tercet.training.stream_documents import read_by_all

T, B = 64, 2


def recipe_of(fields: dict, **data) -> object:
    fields = {
        **fields,
        "data": {"stream": True, "stream_sample_mb": 0.01, "validation_fraction": FRACTION, **data},
        "training": {**fields["training"], "sequence_length": T, "global_batch_size": 24, "per_device_batch_size": B},
    }
    return recipe_from_fields(fields)


@pytest.fixture(scope="module")
def texts(small_corpus) -> list[str]:
    return distinct_texts(small_corpus, 120)


@pytest.fixture(scope="module")
def shards(texts, tmp_path_factory) -> Path:
    return write_shards(tmp_path_factory.mktemp("stream"), texts, 5)


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])  # the last has more processes than shards
def test_the_ranks_read_every_document_once_an_epoch_and_none_held_out(
    recipe_fields, texts, shards, tmp_path, world_size
):
    recipe = recipe_of(recipe_fields, path=str(shards))
    tokenizer, stream = begin(recipe, tmp_path)
    of_first_epoch = []
    for rank in range(world_size):
        steps = batches_of(recipe, tokenizer, stream, rank, world_size)
        found = [
            tokenizer.decode([token for token, _ in document])
            for document in documents_of(steps, 14, tokenizer.eos_token_id)
        ]
        epochs = [texts_of_a_rank(shards, rank, world_size, epoch) for epoch in range(4)]
        expected = [text for epoch in epochs for text in epoch]
        assert len(epochs[0]) < len(found) <= len(expected)
        assert found == expected[: len(found)]
        of_first_epoch += found[: len(epochs[0])]
    assert sorted(of_first_epoch) == sorted(trained_texts(texts))


def test_tokens_and_labels_are_those_of_prepared_text(recipe_fields, small_corpus, tmp_path):
    """Conversations, a template and plain text, with names of special tokens, a long document, and rows left out."""
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"say {i}"},
                {"role": "assistant", "content": f"{i} <|endoftext|> it"},
            ]
        }
        for i in range(60)
    ]
    tables = [{"title": f"<|im_end|> {i}", "body": small_corpus[i][:300]} for i in range(60)]
    long = " ".join(small_corpus)[:200_000]
    plain = [{"text": text} for text in ("", "x", *(f"{i} {small_corpus[i][:200]}" for i in range(60)), long)]
    for name, rows in (("chats", chats), ("tables", tables), ("plain", plain)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = [
        {"path": str(tmp_path / "chats.jsonl"), "messages_column": "messages", "weight": 1},
        {"path": str(tmp_path / "tables.jsonl"), "text_template": "# {title}\n{body}", "weight": 1},
        {"path": str(tmp_path / "plain.jsonl"), "min_chars": 5, "weight": 12},
    ]
    recipe = recipe_of(recipe_fields, sources=sources)
    tokenizer, stream = begin(recipe, tmp_path / "run")
    eos = tokenizer.eos_token_id
    steps = batches_of(recipe, tokenizer, stream, 0, 1)
    read = {tuple(document) for document in documents_of(steps, 150, eos)}

    prepared = make_data(
        recipe_from_fields({**recipe.model_dump(), "data": {**recipe.data.model_dump(), "stream": False,
                                                            "stream_sample_mb": 64.0}}),
        tokenizer, tmp_path / "prepared", lambda line: None, progress=False,
    ).train  # fmt: skip
    expected = set()
    for document, length in enumerate(prepared.document_lengths.tolist()):
        tokens = prepared.tokens(document, 0, length - 1).tolist()
        mask = prepared.label_mask(document, 0, length - 1)
        expected.add(tuple(zip(tokens, [True] * len(tokens) if mask is None else mask.tolist(), strict=True)))
    # The name of a special token in a text is plain text: no document of either is cut short by one.
    assert read == expected
    assert any(not is_label for document in read for _, is_label in document)


def test_weights_are_shares_of_tokens(recipe_fields, texts, tmp_path):
    """Of two sources whose tokens are of unlike lengths."""
    words = write_shards(tmp_path / "words", texts, 2)
    rare = write_shards(tmp_path / "rare", [f"{i} {text[:20]} \u4e2d\u6587" for i, text in enumerate(texts)], 2)
    sources = [{"path": str(words), "weight": 3}, {"path": str(rare), "weight": 1}]
    recipe = recipe_of(recipe_fields, sources=sources)
    tokenizer, stream = begin(recipe, tmp_path / "run")
    steps = batches_of(recipe, tokenizer, stream, 0, 1)
    for _ in steps.steps(0, 60):
        pass
    counts = steps.state_dict()["read"]["counts"]
    tokens = [counts[str(path)]["tokens"] for path in (words, rare)]
    longest = max(len(ids) for ids in tokenizer(texts)["input_ids"]) + 400
    assert abs(tokens[0] - 3 * tokens[1]) < 4 * longest < sum(tokens) / 10


def test_a_process_to_which_only_what_is_left_out_falls_says_so(recipe_fields, texts, tmp_path):
    """One file, so that two processes take its rows in turn; every other one is too short."""
    folder = write_shards(tmp_path / "text", [row for text in texts[:60] for row in (text, "x")], 1)
    recipe = recipe_of(recipe_fields, path=str(folder), min_chars=5)
    tokenizer, stream = begin(recipe, tmp_path / "run")
    assert len(list(batches_of(recipe, tokenizer, stream, 0, 2).steps(0, 10))) == 10
    with pytest.raises(DataError, match="rank 1 of 2 no document in a whole epoch: all of its rows are left out"):
        next(batches_of(recipe, tokenizer, stream, 1, 2).steps(0, 3))


@pytest.mark.parametrize(
    ("data", "training", "message"),
    [
        ({"split_by": "tail"}, {}, "data.split_by: tail .*use split_by: document"),
        ({"drop_duplicates": True}, {}, "data.drop_duplicates: true .*set it to false"),
        ({"drop_duplicates": "normalized"}, {}, "data.drop_duplicates: normalized .*set it to false"),
        ({}, {"packing": "best_fit"}, "training.packing: best_fit .*set it to concatenate"),
        ({"stream": False}, {}, "data.stream_sample_mb .*set data.stream: true"),
        ({"stream_sample_mb": 0}, {}, "data.stream_sample_mb is 0"),
        ({"path": None, "sources": [{"path": "a"}, {"path": "b"}]}, {}, "data.stream .*give each a weight"),
        ({"path": None, "sources": [{"path": "a", "weight": 1}] * 2}, {}, "names a twice"),
    ],
)
def test_what_a_stream_cannot_do_is_refused_in_one_line(recipe_fields, data, training, message):
    fields = {**recipe_fields, "data": {"path": "text", "stream": True, "stream_sample_mb": 1.0, **data}}
    fields["training"] = {**fields["training"], **training}
    with pytest.raises(RecipeError, match=message) as caught:
        recipe_from_fields(fields)
    assert "\n" not in str(caught.value)


def test_a_recipe_written_out_is_the_recipe(recipe_fields):
    """What a stream decides stands in the run's recipe.yaml, which is then read as it was."""
    recipe = recipe_from_fields({**recipe_fields, "data": {"path": "text", "stream": True}})
    assert (recipe.data.drop_duplicates, recipe.training.packing) == (False, "concatenate")
    assert recipe_from_fields(recipe.model_dump(mode="json")) == recipe
    prepared = recipe_from_fields(recipe_fields)
    assert (prepared.data.drop_duplicates, prepared.training.packing) == (True, "best_fit")


def test_what_was_read_is_counted_once(recipe_fields, texts, tmp_path):
    """Two sources of one file each, so that the order of their rows is known, with rows that are left out."""
    folders = {"plain": ("", 3), "accents": ("\xe9\xe8 ", 1)}
    rows = {name: [row for text in texts for row in (begin + text, "x")] for name, (begin, _) in folders.items()}
    for name, lines in rows.items():
        write_shards(tmp_path / name, lines, 1)
    sources = [{"path": str(tmp_path / name), "weight": weight} for name, (_, weight) in folders.items()]
    recipe = recipe_of(recipe_fields, sources=sources, min_chars=5)
    tokenizer, stream = begin(recipe, tmp_path / "run")
    steps = batches_of(recipe, tokenizer, stream, 0, 1)
    for _ in steps.steps(0, 20):
        pass
    read = steps.state_dict()["read"]
    for name, lines in rows.items():
        label = str(tmp_path / name)
        counts, skipped = read["counts"][label], read["skipped"][label]["too_short"]["count"]
        trained, seen, upto = [], Counter(), Counter()
        for row in cycle(lines):
            kind = "short" if len(row) < 5 else "held out" if is_validation(row, FRACTION) else "trained"
            # Behind the last document that was trained on to its end come rows that may have been looked at or not.
            if len(trained) < counts["documents"]:
                seen[kind] += 1
                trained += [row] if kind == "trained" else []
            elif kind == "trained":
                break
            else:
                upto[kind] += 1
        assert len(trained) > 20
        assert counts["bytes"] == sum(len(row.encode()) for row in trained)
        assert counts["tokens"] == sum(len(ids) + 1 for ids in tokenizer(trained)["input_ids"])
        assert seen["held out"] <= counts["held_out"] <= seen["held out"] + upto["held out"]
        assert seen["short"] <= skipped <= seen["short"] + upto["short"]
        assert seen["held out"] > 3 * upto["held out"]


def test_the_process_that_is_furthest_tells_how_often_a_source_was_read(recipe_fields, texts, tmp_path):
    """Of two files, one much shorter, the process that has it begins it again and again."""
    folder = write_shards(tmp_path / "text", texts[:40], 1)
    (folder / "01.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[40:]))
    recipe = recipe_of(recipe_fields, path=str(folder))
    tokenizer, stream = begin(recipe, tmp_path / "run")
    states, epochs = [], []
    for rank in range(2):
        steps = batches_of(recipe, tokenizer, stream, rank, 2)
        for _ in steps.steps(0, 12):
            pass
        states.append(steps.state_dict())
        epochs.append(states[-1]["stream"]["positions"][str(folder)]["epoch"])
    assert len(set(epochs)) == 2
    assert read_by_all(states).whole_epochs == {str(folder): max(epochs)}

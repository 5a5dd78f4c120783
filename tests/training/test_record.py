"""How often a text was read, where tokens are no labels or sources have weights; sources measured one by one."""

import json

import pytest

from tercet.training.pipeline import train


def test_conversations_are_read_whole_though_few_tokens_are_labels(make_recipe, small_corpus, tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": text[:400]}, {"role": "assistant", "content": text[400:440] or "no"}]}
        for text in small_corpus[:40]
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"path": None, "sources": [{"path": str(path), "messages_column": "messages"}]}
    measured = train(make_recipe(data=data), output_dir=tmp_path / "run", say=lambda line: None).results
    read = 8 * 4 * 32  # steps, rows, tokens a row
    assert measured.training.epochs == pytest.approx(read / measured.data.train.tokens)
    assert measured.training.tokens_seen < read / 4


def test_of_weighted_sources_the_one_read_most_often_counts(make_recipe, small_corpus, tmp_path):
    for name, texts in (("much", small_corpus[:20]), ("little", small_corpus[20:24])):
        (tmp_path / name).mkdir()
        for i, text in enumerate(texts):
            (tmp_path / name / f"{i}.txt").write_text(text)
    sources = [{"path": str(tmp_path / "much"), "weight": 1}, {"path": str(tmp_path / "little"), "weight": 1}]
    recipe = make_recipe(data={"path": None, "sources": sources, "split_by": "tail"})
    outcome = train(recipe, output_dir=tmp_path / "run", say=lambda line: None)
    from tercet.training.mixture import tokens_by_source
    from tercet.training.token_set import PreparedData

    data = PreparedData.open(tmp_path / "run" / "data")
    tokens = tokens_by_source(data.train)
    fewest = min(tokens.values())
    assert outcome.results.training.epochs == pytest.approx(8 * 4 * 32 / 2 / fewest)
    by_source = outcome.results.evaluation.by_source
    assert by_source.keys() == tokens.keys()
    assert sum(part.num_tokens for part in by_source.values()) == data.validation.num_tokens
    card = (tmp_path / "run" / "README.md").read_text()
    for label, part in by_source.items():
        assert f"| {label.rpartition('/')[2]} | {part.bits_per_byte:.4f} |" in card

"""What a recipe says of its data reaches the training: weights, packing, conversations, skipped rows."""

import json

import pytest
import torch

from tercet.training.loop import TrainingLoop
from tercet.training.pipeline import train
from tercet.training.recipe import recipe_from_fields


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Train for a few steps; returns what was said, and the batches of every step."""

    def run(data, **training):
        recipe = recipe_from_fields(
            {
                "output_dir": str(tmp_path / "run"),
                "data": {"validation_fraction": 0.2, **data},
                "tokenizer": {"vocab_size": 270},
                "model": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
                "training": {"num_steps": 10, "sequence_length": 16, "global_batch_size": 4, "per_device_batch_size": 4,
                             "device": "cpu", **training},
                "optimizer": {"warmup_steps": 0},
                "samples": {"prompts": ["The"], "max_new_tokens": 3},
            }
        )  # fmt: skip
        loops, said, init = [], [], TrainingLoop.__init__
        monkeypatch.setattr(TrainingLoop, "__init__", lambda loop, *a, **k: loops.append(loop) or init(loop, *a, **k))
        outcome = train(recipe, say=said.append)
        return outcome, "\n".join(said), [batch for step in range(10) for batch in loops[0].batches.micro_batches(step)]

    return run


def write_lines(path, word, number):
    path.write_text("".join(f"{word} line {i}, a text of a few {word} words.\n" for i in range(number)))
    return str(path)


def test_weights_are_shares_of_what_is_trained_on(run, tmp_path):
    sources = [
        {"path": write_lines(tmp_path / "apples.txt", "apple", 60), "documents": "lines", "weight": 3},
        {"path": write_lines(tmp_path / "pears.txt", "pear", 200), "documents": "lines", "weight": 1},
    ]
    outcome, said, batches = run({"sources": sources}, sequence_length=64)
    from transformers import AutoTokenizer

    texts = AutoTokenizer.from_pretrained(outcome.output_dir).batch_decode(torch.cat([b["input_ids"] for b in batches]))
    assert all(("apple" in text) != ("pear" in text) for text in texts)
    assert sum("apple" in text for text in texts) == 0.75 * len(texts)
    assert "75.0% of the run" in said
    assert "apples.txt" in said
    assert "epochs" in said


def test_where_no_bar_is_seen_a_line_begins_what_takes_long(run, tmp_path):
    """The standard error of a test is no terminal."""
    path = write_lines(tmp_path / "text.txt", "plum", 120)
    _, said, _ = run({"path": path, "split_by": "tail"})
    begins = [line.split()[0] for line in said.splitlines()]
    assert begins[:4] == ["Reading", "Tokenizer", "Preparing", "Data"]
    assert f"Reading    {path}, to train a tokenizer of up to 270 tokens" in said


def test_concatenated_rows_are_full(run, tmp_path):
    path = write_lines(tmp_path / "text.txt", "plum", 120)
    _, _, batches = run({"sources": [{"path": path, "documents": "lines"}]}, packing="concatenate")
    labels = torch.cat([batch["shift_labels"] for batch in batches])
    # Only the last row of an epoch may end early.
    assert int((labels == -100).any(dim=1).sum()) <= 2


def test_only_what_the_assistant_says_is_learned(run, tmp_path):
    path = tmp_path / "chat.jsonl"
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"question {i} here"},
                {"role": "assistant", "content": f"reply {i}"},
            ]
        }
        for i in range(80)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    outcome, _, batches = run({"sources": [{"path": str(path), "messages_column": "messages"}]})
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(outcome.output_dir)
    labels = torch.cat([batch["shift_labels"].flatten() for batch in batches])
    learned = tokenizer.decode(labels[labels != -100])
    assert "reply" in learned
    assert "question" not in learned
    assert "question" in tokenizer.decode(torch.cat([batch["input_ids"].flatten() for batch in batches]))
    assert outcome.results.training.final_loss_nats > 0


def test_skipped_rows_are_counted_where_the_user_sees_it(run, tmp_path):
    path = tmp_path / "rows.jsonl"
    good = [json.dumps({"text": f"a good row number {i} of text"}) for i in range(80)]
    path.write_text("\n".join([*good[:40], "no json", *good[40:], json.dumps({"other": 1})]) + "\n")
    _, said, _ = run({"sources": [{"path": str(path)}], "on_bad_row": "skip"})
    assert "rows.jsonl" in said
    assert "not JSON" in said or "not_json" in said

"""Samples in the middle of training leave no trace in it, and their file survives what runs survive."""

import json

import pytest
import torch

from tercet.modeling import TercetConfig, TercetForCausalLM
from tercet.training.results import Sample
from tercet.training.samples import make_samples, read_samples, record_samples

SETTINGS = {"max_new_tokens": 6, "temperature": 0.8, "top_p": 0.9}


@pytest.fixture
def model(small_tokenizer):
    torch.manual_seed(0)
    config = TercetConfig(vocab_size=len(small_tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                          hidden_dropout=0.5)  # fmt: skip
    return TercetForCausalLM(config).train()


def test_sampling_changes_nothing_of_training(model, small_tokenizer):
    ids = torch.arange(20)[None]

    def loss_after(sampled):
        torch.manual_seed(7)
        if sampled:
            make_samples(model, small_tokenizer, ["The"], **SETTINGS)
        assert model.training
        return float(model(ids, labels=ids).loss)  # dropout draws from the random state

    assert loss_after(True) == loss_after(False)


def test_the_same_weights_write_the_same(model, small_tokenizer):
    first, again = (make_samples(model, small_tokenizer, ["The", ""], seed=3, **SETTINGS) for _ in range(2))
    assert first == again
    assert [sample.prompt for sample in first] == ["The", ""]
    assert first != make_samples(model, small_tokenizer, ["The", ""], seed=4, **SETTINGS)


def test_a_stop_in_the_middle_leaves_training_mode(model, small_tokenizer, monkeypatch):
    def stop(*arguments, **keywords):
        raise KeyboardInterrupt

    monkeypatch.setattr(model, "generate", stop)
    with pytest.raises(KeyboardInterrupt):
        make_samples(model, small_tokenizer, ["The"], **SETTINGS)
    assert model.training


def test_samples_of_a_run_that_was_killed(tmp_path):
    path = tmp_path / "samples.jsonl"
    one, two = Sample(prompt="日\u2028", text="a\nb", settings="x"), Sample(prompt="q", text="", settings="x")
    assert read_samples(path) == []
    record_samples(path, 10, [one, two])
    record_samples(path, 20, [one])
    with path.open("a", encoding="utf-8") as file:
        file.write('{"step": 30, "prom')  # torn by a kill
    # The run went back to its checkpoint of step 10, and comes to step 20 again.
    record_samples(path, 20, [two])
    assert read_samples(path) == [
        {"step": 10, "prompt": "日\u2028", "text": "a\nb"},
        {"step": 10, "prompt": "q", "text": ""},
        {"step": 20, "prompt": "q", "text": ""},
    ]
    lines = path.read_text("utf-8").split("\n")
    assert json.loads(lines[0])["prompt"] == "日\u2028"

"""The recipes that need accelerators, a few steps of a copy that is as deep in its settings and a fraction as wide."""

import json

import pytest

from tercet.training.pipeline import train
from tercet.training.recipe import load_recipe

# What changes with the width or with the machine; all else is the recipe's own: rates, schedule, z-loss, decay, batch
# warm-up, recomputed blocks, retention.
NARROW = [
    "model.hidden_size=64", "model.num_hidden_layers=4", "model.num_attention_heads=4", "model.num_key_value_heads=1",
    "model.intermediate_size=176", "tokenizer.vocab_size=512", "training.sequence_length=64", "training.num_steps=24",
    "training.global_batch_size=16", "training.per_device_batch_size=8", "optimizer.warmup_steps=4",
    "training.compile=false", "training.device=cpu", "training.log_every=1", "training.evaluate_every=12",
    "training.save_every=12", "training.sample_every=12", "training.keep_every=12", "samples.max_new_tokens=4",
    "data.validation_fraction=0.1",
]  # fmt: skip
STAGES = {"large": ["training.batch_size_warmup=[{until_step: 6, global_batch_size: 8}]"]}


@pytest.mark.parametrize("name", ["small", "base", "large"])
def test_a_narrow_copy_learns(name, text_folder, tmp_path):
    recipe = load_recipe(name, [*NARROW, *STAGES.get(name, ()), f"data.path={text_folder}"])
    outcome = train(recipe, output_dir=tmp_path / "run", say=lambda line: None)
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss_nats"] for record in records if "loss_nats" in record]
    assert len(losses) == 24
    assert losses[0] == pytest.approx(6.24, abs=0.3)  # ln 512: nothing is known at the start
    assert sum(losses[-4:]) / 4 < losses[0] - 0.75
    assert max(losses) < losses[0] + 0.5
    assert outcome.results is not None
    assert outcome.results.evaluation is not None
    assert outcome.results.training.tokens_seen == pytest.approx(
        64 * recipe.training.batch_sizes().before(24), rel=0.02
    )

"""A run that takes seconds: small text, small model, a few steps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tercet.training.recipe import Recipe, recipe_from_fields


@pytest.fixture(scope="session")
def text_folder(small_corpus, tmp_path_factory) -> Path:
    """Forty documents of English prose, a file each."""
    folder = tmp_path_factory.mktemp("text")
    for index, text in enumerate(small_corpus[:40]):
        (folder / f"{index:02d}.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def recipe_fields(text_folder) -> dict[str, Any]:
    """The recipe as plain values, to be changed by a test. It has dropout, so that random state matters."""
    return _recipe_fields(text_folder)


@pytest.fixture(scope="session")
def make_fields() -> Callable[[Path], dict[str, Any]]:
    """Makes `recipe_fields` of a folder of text, for fixtures that live longer than a test."""
    return _recipe_fields


@pytest.fixture(scope="session")
def untouched(text_folder, tmp_path_factory) -> Path:
    """The folder of a run of this recipe that nothing has stopped; to be read only."""
    from tercet.training.pipeline import train

    folder = tmp_path_factory.mktemp("runs") / "untouched"
    train(recipe_from_fields(_recipe_fields(text_folder)), output_dir=folder, say=lambda line: None)
    return folder


@pytest.fixture(scope="session")
def killed_run(text_folder, tmp_path_factory) -> Path:
    """The folder of a run of this recipe that died in its eighth step; to be copied."""
    from resumed_runs import train_until_killed

    folder = tmp_path_factory.mktemp("runs") / "killed"
    train_until_killed(recipe_from_fields(_recipe_fields(text_folder)), folder, 8)
    return folder


def _recipe_fields(text_folder: Path) -> dict[str, Any]:
    return {
        "output_dir": "unused",
        "seed": 3,
        "data": {"path": str(text_folder), "validation_fraction": 0.2},
        "tokenizer": {"vocab_size": 300},
        "model": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_dropout": 0.1},
        "optimizer": {"warmup_steps": 2},
        "training": {
            "num_steps": 8,
            "sequence_length": 32,
            "global_batch_size": 4,
            "per_device_batch_size": 2,
            "device": "cpu",
            "log_every": 1,
            "evaluate_every": 4,
            "save_every": 3,
        },
        "samples": {"prompts": ["The"], "max_new_tokens": 5},
    }


@pytest.fixture
def make_recipe(recipe_fields) -> Callable[..., Recipe]:
    """The recipe with some values changed: make_recipe(training={"num_steps": 2})."""

    def make(**sections: dict[str, Any]) -> Recipe:
        fields = dict(recipe_fields)
        for name, values in sections.items():
            fields[name] = {**fields.get(name, {}), **values} if isinstance(values, dict) else values
        return recipe_from_fields(fields)

    return make

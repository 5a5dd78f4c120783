"""A Hub on loopback for each test that asks for one, and a checkpoint to publish."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import HubServer

from small_runs import SMALL


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    """A Hub with one user and no repository; it fails the test if it was asked for what it does not have."""
    with HubServer(tmp_path / "hub") as server:
        yield server
    _check(server)


@pytest.fixture(scope="module")
def shared_hub(tmp_path_factory) -> Iterator[HubServer]:
    """One Hub for the tests of a file that only read from it."""
    with HubServer(tmp_path_factory.mktemp("hub")) as server:
        yield server
    _check(server)


def _check(server: HubServer) -> None:
    assert server.mistakes == []
    assert [record.line for record in server.requests if not record.is_known] == []


@pytest.fixture(scope="session")
def trained(small_corpus, tmp_path_factory) -> Path:
    """The folder of a finished run of a few steps, of a model that Llama can express. To be read only."""
    from tercet.training.pipeline import train
    from tercet.training.recipe import load_recipe

    text = tmp_path_factory.mktemp("text") / "book.txt"
    text.write_text("\n\n".join(small_corpus[:20]), encoding="utf-8")
    folder = tmp_path_factory.mktemp("runs") / "trained"
    settings = [*SMALL, "model.qk_norm=false", f"data.path={text}"]
    train(load_recipe("shakespeare", settings), output_dir=folder, say=lambda line: None)
    return folder


@pytest.fixture(scope="session")
def small_checkpoint(small_tokenizer, tmp_path_factory) -> Path:
    """A run's folder as `tercet train` leaves it, untrained, to be pushed. Shared: a test that changes it copies it."""
    from pushed_runs import write_checkpoint

    return write_checkpoint(tmp_path_factory.mktemp("runs") / "verse", small_tokenizer)

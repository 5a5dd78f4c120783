"""What every test shares: no network, one thread, a corpus that every Python carries."""

import os

# Before any import that reads them; subprocesses of the tests inherit them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

from pathlib import Path
from pydoc_data import topics
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _compiled_anew(request) -> None:
    """A slow test compiles for itself, whatever ran before it in this process.

    A function that was compiled for other shapes is compiled again for all shapes, and on a CPU torch 2.13 then writes
    C++ for flex attention that no compiler takes.
    """
    if request.node.get_closest_marker("slow"):
        import torch

        torch._dynamo.reset()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """What a test draws is the same in every run, alone or among others; where it wants other draws it seeds itself."""
    from transformers import set_seed

    set_seed(0)


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def small_corpus() -> list[str]:
    """About 0.5 MB of English prose and code in some 80 documents: the language reference that pydoc carries."""
    return [text for _, text in sorted(topics.topics.items())]


@pytest.fixture(scope="session")
def small_tokenizer(small_corpus) -> "PreTrainedTokenizerFast":
    """1024 tokens. Shared by the whole session: a test that changes it works on a copy."""
    from tercet.tokenizer import train_tokenizer

    return train_tokenizer(small_corpus, vocab_size=1024)


@pytest.fixture(scope="session")
def wheel_environment(root, tmp_path_factory) -> Path:
    """A new virtual environment that holds the wheel and, by a path entry, the libraries of this one."""
    from installed_wheel import install_wheel

    return install_wheel(root, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Larger real corpora, where the checkout has them beside it."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("needs the corpora of ../shared/data, which are not beside this checkout")
    return folder

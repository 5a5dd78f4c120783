"""The folder of the benchmarks on the path of every test."""

import pytest


@pytest.fixture(autouse=True)
def benchmarks(root, monkeypatch):
    """The scripts import each other from their own folder."""
    monkeypatch.syspath_prepend(str(root / "benchmarks"))

"""From text to a trained checkpoint: recipe, data, optimizers, the loop, evaluation.

Names are loaded when they are first used: `from tercet.training import load_recipe` does not import torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tercet.training.documents import DataError, Document
    from tercet.training.errors import UserError
    from tercet.training.evaluation import evaluate
    from tercet.training.optimizers import Muon
    from tercet.training.packing import PackedDataset, pack
    from tercet.training.pipeline import RunOutcome, train
    from tercet.training.recipe import Recipe, load_recipe
    from tercet.training.shards import prepare
    from tercet.training.sources import Source, read_documents
    from tercet.training.token_set import PreparedData

_MODULES = {
    "DataError": "documents",
    "Document": "documents",
    "Muon": "optimizers",
    "PackedDataset": "packing",
    "PreparedData": "token_set",
    "Recipe": "recipe",
    "RunOutcome": "pipeline",
    "Source": "sources",
    "UserError": "errors",
    "evaluate": "evaluation",
    "load_recipe": "recipe",
    "pack": "packing",
    "prepare": "shards",
    "read_documents": "sources",
    "train": "pipeline",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "DataError",
    "Document",
    "Muon",
    "PackedDataset",
    "PreparedData",
    "Recipe",
    "RunOutcome",
    "Source",
    "UserError",
    "evaluate",
    "load_recipe",
    "pack",
    "prepare",
    "read_documents",
    "train",
]

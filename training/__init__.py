"""From text to a trained checkpoint: recipe, data, optimizers, the loop, evaluation.

Names are loaded when they are first used: `from tercet.training import load_recipe` does not import torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tercet.training.arrangement import arrange
    from tercet.training.documents import DataError, Document, Segment
    from tercet.training.errors import UserError
    from tercet.training.evaluation import evaluate
    from tercet.training.optimizers import Muon
    from tercet.training.packing import PackedDataset, pack
    from tercet.training.pipeline import RunOutcome, train
    from tercet.training.recipe import Recipe, load_recipe
    from tercet.training.shards import prepare
    from tercet.training.skips import SkipReport
    from tercet.training.sources import Source, read_documents
    from tercet.training.stream_batches import StreamBatches
    from tercet.training.stream_order import StreamOrder
    from tercet.training.token_set import PreparedData

_MODULES = {
    "DataError": "documents",
    "Document": "documents",
    "Muon": "optimizers",
    "PackedDataset": "packing",
    "PreparedData": "token_set",
    "Recipe": "recipe",
    "RunOutcome": "pipeline",
    "Segment": "documents",
    "SkipReport": "skips",
    "Source": "sources",
    "StreamBatches": "stream_batches",
    "StreamOrder": "stream_order",
    "UserError": "errors",
    "arrange": "arrangement",
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
    "Segment",
    "SkipReport",
    "Source",
    "StreamBatches",
    "StreamOrder",
    "UserError",
    "arrange",
    "evaluate",
    "load_recipe",
    "pack",
    "prepare",
    "read_documents",
    "train",
]

"""Tercet: pretrain decoder-only language models from raw text, native to transformers, and look inside them.

    >>> from tercet import TercetConfig, TercetForCausalLM, load_recipe, train, train_tokenizer

Names are loaded when they are first used; importing the package alone does not import torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from tercet.explorer import Trace, render, trace
    from tercet.modeling import TercetCache, TercetConfig, TercetForCausalLM, TercetModel
    from tercet.tokenizer import train_tokenizer
    from tercet.training import Recipe, load_recipe, train

_MODULES = {
    "Recipe": "training",
    "TercetCache": "modeling",
    "TercetConfig": "modeling",
    "TercetForCausalLM": "modeling",
    "TercetModel": "modeling",
    "Trace": "explorer",
    "load_recipe": "training",
    "render": "explorer",
    "trace": "explorer",
    "train": "training",
    "train_tokenizer": "tokenizer",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Recipe",
    "TercetCache",
    "TercetConfig",
    "TercetForCausalLM",
    "TercetModel",
    "Trace",
    "__version__",
    "load_recipe",
    "render",
    "trace",
    "train",
    "train_tokenizer",
]

"""Finds the parts of a decoder that the Auto classes load: embedding, blocks, attention and MLP of each, head.

Families name their modules as they like. What they share is used instead: transformers' own accessors for embedding and
head, a `ModuleList` with as many members as the config has layers, a block's child whose class is called attention, and
matrices among its other children.
"""

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from tercet.explorer.record import WeightFacts
from tercet.explorer.words import BilingualError

_ACTIVATION_FIELDS = ("hidden_act", "hidden_activation", "activation_function", "activation", "afn")


@dataclass(frozen=True)
class Block:
    """One block.

    Attributes:
        attention: The child that attends; None in a block that does something else.
        feed_forward: Its other children with matrices, the MLP's or an MLP as a whole; none in a block that has none.
    """

    module: nn.Module
    attention: nn.Module | None
    feed_forward: tuple[nn.Module, ...]


@dataclass(frozen=True)
class Anatomy:
    """A decoder's parts; `head` is None where a model has none of its own."""

    embedding: nn.Module
    blocks: tuple[Block, ...]
    head: nn.Module | None

    def block_of(self) -> dict[nn.Module, int]:
        """Which block each module is in."""
        return {module: index for index, block in enumerate(self.blocks) for module in block.module.modules()}

    def outside(self, model: nn.Module) -> list[nn.Module]:
        """Modules that neither are in a block nor contain one."""
        inside = self.block_of()
        return [module for module in model.modules() if not any(part in inside for part in module.modules())]


def text_config(model: PreTrainedModel) -> Any:
    """The config of the decoder; of a model of text and more, the part that is of text."""
    return model.config.get_text_config(decoder=True)


def mlp_width(config: Any) -> int:
    """Width of the MLPs' inside by the config, of the widest where they differ."""
    width = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return width if isinstance(width, int) else max(width)


def activation_name(config: Any) -> str:
    """What the config calls the MLPs' activation."""
    found = (getattr(config, name, None) for name in _ACTIVATION_FIELDS)
    # Some families never ask: they have GELU.
    return next((name for name in found if isinstance(name, str)), "gelu")


def find_parts(model: PreTrainedModel) -> Anatomy:
    """The parts of a causal language model.

    Raises:
        BilingualError: It has no attention, or no list of blocks that can be recognised.
    """
    config = text_config(model)
    if getattr(config, "num_attention_heads", None) is None:
        raise BilingualError("model.heads", model=type(model).__name__)
    num_layers = getattr(config, "num_hidden_layers", 0)
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == num_layers]
    # In a model of one layer other lists have one member, too; nothing is larger than the blocks.
    blocks = max(lists, key=lambda blocks: sum(weight.numel() for weight in blocks.parameters()), default=None)
    if not blocks:
        raise BilingualError("model.blocks", model=type(model).__name__, layers=num_layers)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    return Anatomy(embedding, tuple(_find_block(block) for block in blocks), head)


def _find_block(block: nn.Module) -> Block:
    children = dict(block.named_children())
    attention = next((child for child in children.values() if _attends(child)), None)
    others = {name: child for name, child in children.items() if child is not attention and not is_norm(child)}
    others = {name: child for name, child in others.items() if any(p.ndim >= 2 for p in child.parameters())}
    named = [child for name, child in others.items() if _feeds_forward(name, child)]
    if not named and attention is not None:
        named = list(others.values())  # OPT's blocks hold the MLP's matrices themselves
    return Block(block, attention, tuple(named))


def _feeds_forward(name: str, child: nn.Module) -> bool:
    """By its class's name; a family whose name has "Moe" in it says so of all its classes."""
    mixes = re.search("attn|mamba|conv|temporal|recurrent", name, re.IGNORECASE)
    return mixes is None and re.search("mlp|ffn|feed_?forward|moe", type(child).__name__, re.IGNORECASE) is not None


def _attends(module: nn.Module) -> bool:
    named = re.search("atten|attn", type(module).__name__, re.IGNORECASE) is not None
    return named and not is_norm(module) and any(p.ndim >= 2 for p in module.parameters())


def is_norm(module: nn.Module) -> bool:
    """Whether a module normalises, by its class's name."""
    return "norm" in type(module).__name__.lower()


def is_matrix(module: nn.Module) -> bool:
    """Whether a module multiplies by one matrix: Linear, GPT-2's Conv1D, and what is made like them."""
    weight = getattr(module, "weight", None)
    is_table = isinstance(module, nn.Embedding) or is_norm(module)
    return isinstance(weight, torch.Tensor) and weight.ndim == 2 and not is_table


def is_position_table(module: nn.Module, name: str) -> bool:
    """Whether a module is a table of learned positions, by its name."""
    return isinstance(module, nn.Embedding) and re.search(r"pos|wpe", name.rpartition(".")[2]) is not None


def list_weights(model: PreTrainedModel, anatomy: Anatomy) -> tuple[WeightFacts, ...]:
    """Every parameter in the model's order; a tied one again where it is used again, with the name of the first."""
    block_of = anatomy.block_of()
    modules = dict(model.named_modules())
    first_names: dict[int, str] = {}
    weights = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = modules[name.rpartition(".")[0]]
        layer = block_of.get(owner)
        part = _part_of(owner, name.rpartition(".")[0], anatomy, layer)
        tied_to = first_names.get(id(parameter))
        first_names.setdefault(id(parameter), name)
        weights.append(WeightFacts(name, tuple(parameter.shape), part, layer, tied_to))
    return tuple(weights)


def _part_of(owner: nn.Module, name: str, anatomy: Anatomy, layer: int | None) -> str:
    if owner is anatomy.embedding:
        return "embedding"
    if owner is anatomy.head:
        return "head"
    if is_norm(owner):
        return "norm"
    if layer is None:
        return "positions" if is_position_table(owner, name) else "other"
    block = anatomy.blocks[layer]
    if block.attention is not None and owner in set(block.attention.modules()):
        return "attention"
    return "mlp" if any(owner in set(child.modules()) for child in block.feed_forward) else "other"

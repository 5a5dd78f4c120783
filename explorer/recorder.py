"""One forward pass over all tokens, with forward hooks that write down what flows through it.

Shapes: S tokens, L layers, H query heads, K key/value heads, D head_dim, E hidden_size, F intermediate_size,
V vocab_size.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from tercet.explorer.anatomy import Anatomy, activation_name, is_matrix, is_norm, is_position_table, text_config
from tercet.explorer.attention_probe import PROBE, AttentionCall, attention_set_to, noted_calls
from tercet.explorer.block_parts import Additions, BlockCalls, Call, find_additions
from tercet.explorer.expansion import Before, Expansion, activations_named, find_expansion


@dataclass
class LayerRecord:
    """What one block did; tensors are float32 on the CPU. None where it could not be told.

    Attributes:
        hidden: The residual stream behind it, (S, E).
        attention: What its one call of the attention function showed.
        additions: (S, E) each.
        expansion: The MLP's inside.
        norms_first: Whether a norm was given what the block was given.
    """

    hidden: torch.Tensor
    attention: AttentionCall | None
    additions: Additions | None
    expansion: Expansion | None
    norms_first: bool


@dataclass
class PassRecord:
    """What one pass showed.

    Attributes:
        embeddings: (S, E).
        positions: Learned position embeddings, (S, E).
        angles: cos and sin, (2, S, R).
        first: The residual stream before the first block, (S, E).
        layers: Of each block.
        last: What the last block returned, as it was.
        tail: Modules behind the blocks that took each other's results, from the last block's on.
        logits: As the model returned them, (1, S, V).
    """

    embeddings: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    angles: torch.Tensor | None = None
    first: torch.Tensor | None = None
    layers: list[LayerRecord] = field(default_factory=list)
    last: torch.Tensor | None = None
    tail: list[nn.Module] = field(default_factory=list)
    logits: torch.Tensor | None = None


def record_pass(model: PreTrainedModel, anatomy: Anatomy, ids: torch.Tensor) -> PassRecord:
    """Run the model once, without a cache, and record it.

    Hooks, attention implementation and modes are as before afterwards, whatever happens.

    Args:
        model: In evaluation mode.
        anatomy: Its parts.
        ids: (1, S).
    """
    watch = _Watch(anatomy, text_config(model))
    with attention_set_to(model, PROBE), noted_calls() as calls, _hooked(watch.hooks(model)):
        output = model(input_ids=ids, use_cache=False, return_dict=True)
    record = watch.record
    record.logits = output.logits
    for index, call in _by_block(anatomy, calls).items():
        record.layers[index].attention = call
    record.tail = _follow(record.last, watch.outside)
    return record


def _by_block(anatomy: Anatomy, calls: Sequence[AttentionCall]) -> dict[int, AttentionCall]:
    """The call of each block that made exactly one."""
    block_of = anatomy.block_of()
    blocks = [block_of.get(call.module, -1) for call in calls]
    return {block: call for block, call in zip(blocks, calls, strict=True) if block >= 0 and blocks.count(block) == 1}


def _follow(tensor: torch.Tensor | None, calls: Sequence[Call]) -> list[nn.Module]:
    chain = []
    for call in calls:
        if call.given is tensor:
            chain.append(call.module)
            tensor = call.returned
    return chain


_Hook = tuple[nn.Module, str, Callable]


@contextmanager
def _hooked(hooks: Sequence[_Hook]) -> Iterator[None]:
    handles = []
    try:
        for module, kind, hook in hooks:
            register = module.register_forward_pre_hook if kind == "before" else module.register_forward_hook
            handles.append(register(hook, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Watch:
    """The hooks of a pass, and what they have seen."""

    def __init__(self, anatomy: Anatomy, config: Any) -> None:
        self.anatomy = anatomy
        self.residual_multiplier = float(getattr(config, "residual_multiplier", 1.0))
        self.functions = activations_named(activation_name(config))
        self.record = PassRecord()
        # Kept until the end of the pass: a tensor that is gone may lend its identity to another one.
        self.outside: list[Call] = []
        self.calls: BlockCalls | None = None

    def hooks(self, model: nn.Module) -> list[_Hook]:
        """All of them, in the order in which those of one module have to run."""
        hooks: list[_Hook] = []
        names = {module: name for name, module in model.named_modules()}
        for module in self.anatomy.outside(model):
            hooks.append((module, "after", self._note_outside))
            if is_position_table(module, names[module]):
                hooks.append((module, "after", self._note_positions))
            elif "rotary" in type(module).__name__.lower():
                hooks.append((module, "after", self._note_angles))
        hooks.append((self.anatomy.embedding, "after", self._note_embeddings))
        for block in self.anatomy.blocks:
            matrices = {matrix for part in block.feed_forward for matrix in part.modules() if is_matrix(matrix)}
            hooks.append((block.module, "before", self._enter_block))
            hooks += [(matrix, "after", self._note_matrix) for matrix in matrices]
            hooks += [(child, "after", self._note_child) for child in block.module.children()]
            hooks.append((block.module, "after", self._leave_block))
        return hooks

    def _note_outside(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        call = _call(module, args, kwargs, output)
        if call is not None:
            self.outside.append(call)

    def _note_embeddings(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        if self.record.embeddings is None:
            self.record.embeddings = _rows(output)

    def _note_positions(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        self.record.positions = _rows(output)

    def _note_angles(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        # Families that turn some layers otherwise call several times: the first is the first layer's.
        is_pair = isinstance(output, tuple) and len(output) == 2 and all(torch.is_tensor(part) for part in output)
        if is_pair and self.record.angles is None:
            self.record.angles = torch.stack([_rows(part) for part in output])

    def _enter_block(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        given = _first_tensor(args, kwargs)
        assert given is not None
        if self.record.first is None:
            self.record.first = _rows(given)
        self.calls = BlockCalls(given)

    def _note_child(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        call = _call(module, args, kwargs, output)
        if call is not None and self.calls is not None:
            self.calls.children.append(call)

    def _note_matrix(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        call = _call(module, args, kwargs, output)
        if call is not None and self.calls is not None:
            self.calls.matrices.append(call)

    def _leave_block(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        returned, calls = first_tensor(output), self.calls
        assert returned is not None and calls is not None
        block = self.anatomy.blocks[len(self.record.layers)]
        additions = find_additions(block, calls, returned, self.residual_multiplier)
        expansion = find_expansion(block, calls, additions, self.functions)
        self.record.layers.append(
            LayerRecord(
                _rows(returned),
                None,
                None if additions is None else Additions(*map(_rows, additions)),
                None if expansion is None else _kept(expansion),
                any(is_norm(call.module) and call.given is calls.given for call in calls.children),
            )
        )
        self.record.last, self.calls = returned, None


def _call(module: nn.Module, args: tuple, kwargs: Mapping[str, Any], output: Any) -> Call | None:
    given, returned = _first_tensor(args, kwargs), first_tensor(output)
    return None if given is None or returned is None else Call(module, given, returned, returned.clone())


def _first_tensor(args: tuple, kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    return first_tensor((*args, kwargs.get("hidden_states"), *kwargs.values()))


def first_tensor(value: Any) -> torch.Tensor | None:
    """A tensor, or the first in a tuple, list or output of a model."""
    if isinstance(value, torch.Tensor):
        return value
    values = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return next((part for part in values if isinstance(part, torch.Tensor)), None)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """(1, S, E) or (S, E) -> (S, E), float32 on the CPU."""
    return _on_cpu(tensor.reshape(-1, tensor.shape[-1]))


def _kept(expansion: Expansion) -> Expansion:
    before = expansion.before
    if before is not None:
        before = Before(None if before.gates is None else _on_cpu(before.gates), _on_cpu(before.ups))
    return expansion._replace(activations=_on_cpu(expansion.activations), before=before)


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    # A clone: what a module returned may be changed in place by those behind it.
    return tensor.detach().to("cpu", torch.float32, copy=True)

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
from tercet.explorer.block_parts import Additions, BlockCalls, Call, find_additions, find_wiring
from tercet.explorer.expansion import Expansion, activations_named, find_expansion
from tercet.explorer.norms import norm_facts
from tercet.explorer.record import NormFacts
from tercet.explorer.rotation import RotationWatch, is_rotary
from tercet.explorer.words import BilingualError


@dataclass
class LayerRecord:
    """What one block did; tensors are float32 on the CPU. None where it could not be told.

    Attributes:
        hidden: The residual stream behind it, (S, E).
        attention: What its one call of the attention function showed.
        additions: (S, E) each.
        attends: Whether it called the attention function at all.
        expansion: The MLP's inside.
        attention_stream: What attention reads: "input" or "unknown".
        mlp_stream: What the MLP reads: "input" of the block, "middle" or "unknown".
        norm_before_attention: Which norm stands before it; likewise the other three.
        inner_norms: Names of norms inside attention that were called.
    """

    hidden: torch.Tensor
    additions: Additions | None
    expansion: Expansion | None
    attention_stream: str
    mlp_stream: str
    norm_before_attention: NormFacts | None
    norm_after_attention: NormFacts | None
    norm_before_mlp: NormFacts | None
    norm_after_mlp: NormFacts | None
    inner_norms: tuple[str, ...]
    attention: AttentionCall | None = None
    attends: bool = False


@dataclass
class PassRecord:
    """What one pass showed.

    Attributes:
        embeddings: (S, E).
        table_rows: What the embedding's matrix has for the ids, (S, its width); None if it was not asked by ids.
        positions: Learned position embeddings, (S, E).
        position_offset: Which row of their matrix the first of them is; None if it is none of the first few.
        angles: cos and sin of each rotation, (2, S, R).
        rotated: Which of `angles` each block uses, as `RotationWatch.used` has it.
        first: The residual stream before the first block, (S, E).
        layers: Of each block.
        last: What the last block returned, as it was.
        tail: Calls of modules behind the blocks that took each other's results, from the last block's on.
        entry_norm: Whether a norm gave what the first block was given.
        norms: Facts of the norms that are in no block.
        head: What the head returned, (1, S, V).
        logits: As the model returned them, (1, S, V).
    """

    embeddings: torch.Tensor | None = None
    table_rows: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    position_offset: int | None = None
    angles: list[torch.Tensor] = field(default_factory=list)
    rotated: dict[int, int] = field(default_factory=dict)
    first: torch.Tensor | None = None
    layers: list[LayerRecord] = field(default_factory=list)
    last: torch.Tensor | None = None
    tail: list[Call] = field(default_factory=list)
    entry_norm: bool = False
    norms: dict[nn.Module, NormFacts] = field(default_factory=dict)
    head: torch.Tensor | None = None
    logits: torch.Tensor | None = None


def record_pass(model: PreTrainedModel, anatomy: Anatomy, ids: torch.Tensor) -> PassRecord:
    """Run the model once, without a cache, and record it.

    Hooks, attention implementation and modes are as before afterwards, whatever happens.

    Args:
        model: In evaluation mode.
        anatomy: Its parts.
        ids: (1, S).

    Raises:
        BilingualError: A text alone does not go through all blocks (some are for pictures).
    """
    watch = _Watch(model, anatomy)
    with attention_set_to(model, PROBE), noted_calls() as calls, _hooked(watch.hooks(model)), watch.rotation:
        output = model(input_ids=ids, use_cache=False, return_dict=True)
    record = watch.record
    if len(record.layers) != len(anatomy.blocks):
        values = {"reached": len(record.layers), "layers": len(anatomy.blocks)}
        raise BilingualError("model.skipped", model=type(model).__name__, **values)
    record.logits = output.logits
    record.angles, record.rotated = watch.rotation.angles, watch.rotation.used
    block_of = anatomy.block_of()
    blocks = [block_of.get(call.module, -1) for call in calls]
    for block, call in zip(blocks, calls, strict=True):
        if block >= 0:
            record.layers[block].attends = True
            record.layers[block].attention = call if blocks.count(block) == 1 else None
    record.tail = _follow(record.last, watch.outside)
    record.head = next((call.value for call in reversed(watch.outside) if call.module is anatomy.head), None)
    record.entry_norm = any(call.returned is watch.entry and is_norm(call.module) for call in watch.outside)
    return record


def _follow(tensor: torch.Tensor | None, calls: Sequence[Call]) -> list[Call]:
    chain = []
    for call in calls:
        if call.given is tensor:
            chain.append(call)
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

    def __init__(self, model: PreTrainedModel, anatomy: Anatomy) -> None:
        self.anatomy = anatomy
        config = text_config(model)
        self.residual_multiplier = float(getattr(config, "residual_multiplier", 1.0))
        self.functions = activations_named(activation_name(config))
        self.record = PassRecord()
        # Kept until the end of the pass: a tensor that is gone may lend its identity to another one.
        self.outside: list[Call] = []
        self.entry: torch.Tensor | None = None
        self.calls: BlockCalls | None = None
        self.norms: dict[nn.Module, NormFacts] = {}
        self.names = {module: name for name, module in model.named_modules()}
        self.rotation = RotationWatch(model, lambda: None if self.calls is None else len(self.record.layers))

    def hooks(self, model: nn.Module) -> list[_Hook]:
        """All of them, in the order in which those of one module have to run."""
        hooks: list[_Hook] = []
        hooks += [(module, "after", self._note_norm) for module in model.modules() if is_norm(module)]
        hooks += [(module, "after", self._note_angles) for module in model.modules() if is_rotary(module)]
        for module in self.anatomy.outside(model):
            hooks.append((module, "after", self._note_outside))
            if is_position_table(module, self.names[module]):
                hooks.append((module, "after", self._note_positions))
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

    def _note_norm(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        given, returned = _first_tensor(args, kwargs), first_tensor(output)
        if given is not None and returned is not None:
            facts = norm_facts(module, self.names[module].rpartition(".")[2], given, returned)
            self.norms[module] = facts
            if self.calls is None:
                self.record.norms[module] = facts

    def _note_embeddings(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        if self.record.embeddings is None:
            self.record.embeddings = _rows(output)
            table, ids = getattr(module, "weight", None), _first_tensor(args, kwargs)
            if isinstance(table, torch.Tensor) and ids is not None and not ids.is_floating_point():
                self.record.table_rows = _rows(table[ids])

    def _note_positions(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        self.record.positions = _rows(output)
        table, rows = module.weight, output.reshape(-1, output.shape[-1])
        assert isinstance(table, torch.Tensor)
        offsets = range(min(4, len(table) - len(rows) + 1))
        self.record.position_offset = next((i for i in offsets if torch.equal(table[i : i + len(rows)], rows)), None)

    def _note_angles(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        self.rotation.note_angles(output)

    def _enter_block(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        given = _first_tensor(args, kwargs)
        assert given is not None
        if self.record.first is None:
            self.record.first, self.entry = _rows(given), given
        self.calls = BlockCalls(given, given.clone())

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
        wiring = find_wiring(block, calls, additions)
        inside = [] if block.attention is None else list(block.attention.modules())
        self.record.layers.append(
            LayerRecord(
                _rows(returned),
                None if additions is None else _rows_of(additions),
                None if expansion is None else _kept(expansion),
                wiring.attention_source.stream,
                wiring.mlp_source.stream,
                self._facts_of(wiring.attention_source.norm),
                self._facts_of(wiring.attention_norm),
                self._facts_of(wiring.mlp_source.norm),
                self._facts_of(wiring.mlp_norm),
                tuple(self.norms[module].module for module in inside if module in self.norms),
            )
        )
        self.record.last, self.calls = returned, None

    def _facts_of(self, call: Call | None) -> NormFacts | None:
        return None if call is None else self.norms.get(call.module)


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


def _rows_of(additions: Additions) -> Additions:
    return Additions(_rows(additions.attention), _rows(additions.mlp), additions.scale)


def _kept(expansion: Expansion) -> Expansion:
    before = expansion.before
    if before is not None:
        gates = None if before.gates is None else _on_cpu(before.gates)
        before = before._replace(gates=gates, ups=_on_cpu(before.ups))
    return expansion._replace(activations=_on_cpu(expansion.activations), before=before)


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    # A clone: what a module returned may be changed in place by those behind it.
    return tensor.detach().to("cpu", torch.float32, copy=True)

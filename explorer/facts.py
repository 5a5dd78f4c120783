"""What a model is, under the names that all families share: from its config, and from what a pass showed."""

import json
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from tercet.explorer.anatomy import Anatomy, Block, activation_name, list_weights, mlp_width, text_config
from tercet.explorer.costs import has_experts
from tercet.explorer.passage import entry_facts, exit_facts
from tercet.explorer.reach import find_reach
from tercet.explorer.record import LayerFacts, ModelFacts
from tercet.explorer.recorder import LayerRecord, PassRecord
from tercet.training.accounting import num_parameters
from tercet.training.hardware import processor_name

_POSITION_FIELDS = ("max_position_embeddings", "max_seq_len", "max_sequence_length")
_ROUNDING = 0.02  # of the sum of a row of bfloat16 weights


def model_facts(model: PreTrainedModel, anatomy: Anatomy, record: PassRecord, name: str) -> ModelFacts:
    """Facts for the page; sizes as the pass had them, where it shows them."""
    config = text_config(model)
    call = next((layer.attention for layer in record.layers if layer.attention is not None), None)
    num_heads = call.query.shape[0] if call else config.num_attention_heads
    hidden_size = record.layers[0].hidden.shape[-1]
    num_kv_heads = call.key.shape[0] if call else getattr(config, "num_key_value_heads", None) or num_heads
    head_dim = call.query.shape[-1] if call else getattr(config, "head_dim", None) or hidden_size // num_heads
    layers = _Layers(model, anatomy, record, num_kv_heads, head_dim)
    activation, is_seen = _activation(config, record)
    return ModelFacts(
        name=name,
        class_name=type(model).__name__,
        model_type=model.config.model_type,
        dtype=str(model.dtype).removeprefix("torch."),
        num_layers=len(anatomy.blocks),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=config.vocab_size,
        max_positions=max_positions(model),
        positions=layers.positions,
        activation=activation,
        activation_is_seen=is_seen,
        entry=entry_facts(record),
        exit=exit_facts(config, anatomy, record),
        layers=tuple(layers.facts(index) for index in range(len(anatomy.blocks))),
        num_parameters=num_parameters(model),
        weights=list_weights(model, anatomy),
        hyperparameters=_hyperparameters(model),
    )


class _Layers:
    """Facts of each block."""

    def __init__(
        self, model: PreTrainedModel, anatomy: Anatomy, record: PassRecord, num_kv_heads: int, head_dim: int
    ) -> None:
        self.config = text_config(model)
        self.blocks, self.records, self.rotated = anatomy.blocks, record.layers, record.rotated
        self.sizes = (num_kv_heads, head_dim)
        self.positions = _positions(self.config, record)
        self.shown_angles = [i for i, a in enumerate(record.angles) if a.shape == record.angles[0].shape]

    def facts(self, index: int) -> LayerFacts:
        """Of one block."""
        block, layer = self.blocks[index], self.records[index]
        call = layer.attention
        reach = find_reach(self.config, index, call)
        num_kv_heads, head_dim = self.sizes if call is None else (call.key.shape[0], call.query.shape[-1])
        expansion = layer.expansion
        return LayerFacts(
            mixer=_mixer(block),
            attends=self._attends(index),
            num_key_value_heads=num_kv_heads,
            head_dim=head_dim,
            window=reach.window,
            chunk=reach.chunk,
            rotates=self._rotates(index),
            angle_set=self._angle_set(index),
            attention_scale=None if call is None else call.scale,
            softcap=None if call is None else call.softcap,
            has_sink=call is not None and bool((1 - call.weights.sum(-1)).max() > _ROUNDING),
            order=_order(layer),
            added_scale=1.0 if layer.additions is None else layer.additions.scale,
            attention_input=_input(layer.attention_stream, layer.norm_before_attention is not None),
            mlp_input=_input(layer.mlp_stream, layer.norm_before_mlp is not None),
            norm_before_attention=layer.norm_before_attention,
            norm_after_attention=layer.norm_after_attention,
            norm_before_mlp=layer.norm_before_mlp,
            norm_after_mlp=layer.norm_after_mlp,
            inner_norms=layer.inner_norms,
            mlp=_mlp_kind(block, layer),
            mlp_width=_expert_width(block, self.config) if expansion is None else expansion.activations.shape[-1],
        )

    def _attends(self, index: int) -> bool:
        # Of a family without the attention interface none is seen to call it.
        is_seen = any(layer.attends for layer in self.records)
        return self.records[index].attends if is_seen else self.blocks[index].attention is not None

    def _rotates(self, index: int) -> bool | None:
        if self.positions != "rotary" or not self._attends(index):
            return False
        # Where no block was seen to use angles, they come by a way that is not followed.
        return index in self.rotated if self.rotated else None

    def _angle_set(self, index: int) -> int | None:
        found = self.rotated.get(index)
        return self.shown_angles.index(found) if found in self.shown_angles else None


def _mixer(block: Block) -> str:
    if block.attention is not None:
        return type(block.attention).__name__
    others = [child for child in block.module.children() if child not in block.feed_forward]
    mixing = [child for child in others if any(p.ndim >= 2 for p in child.parameters())]
    return type(mixing[0]).__name__ if mixing else ""


def _order(layer: LayerRecord) -> str:
    """How the MLP stands to attention, where the block is the sum of its input and both."""
    if layer.additions is None or layer.attention_stream != "input":
        return "other"
    return {"middle": "sequential", "input": "parallel"}.get(layer.mlp_stream, "other")


def _input(stream: str, is_normed: bool) -> str:
    return "normed" if is_normed else "unknown" if stream == "unknown" else "as_is"


def _mlp_kind(block: Block, layer: LayerRecord) -> str:
    if not block.feed_forward:
        return "none"
    if any(has_experts(part) for part in block.feed_forward):
        return "experts"
    before = None if layer.expansion is None else layer.expansion.before
    return "unknown" if before is None else "plain" if before.gates is None else "gated"


def _expert_width(block: Block, config: Any) -> int:
    """Of experts that are one weight (experts, E, F); else by the config."""
    for part in block.feed_forward:
        for name, weight in part.named_parameters():
            if weight.ndim == 3 and name.endswith("down_proj"):
                sizes = sorted(weight.shape[1:], key=lambda size: size == config.hidden_size)
                return sizes[0]
    own = getattr(config, "moe_intermediate_size", None)
    is_expert = any(has_experts(part) for part in block.feed_forward)
    return own if is_expert and isinstance(own, int) else mlp_width(config)


def _activation(config: Any, record: PassRecord) -> tuple[str, bool]:
    """The one that all MLPs were seen to have, else the config's."""
    seen = [None if x.expansion is None or x.expansion.before is None else x.expansion.before for x in record.layers]
    names = {None if before is None else before.activation for before in seen}
    name = names.pop() if len(names) == 1 else None
    return (activation_name(config), False) if name is None else (name, True)


def max_positions(model: PreTrainedModel) -> int | None:
    """The longest context that the config tells, in tokens."""
    config = text_config(model)
    found = (getattr(config, name, None) for name in _POSITION_FIELDS)
    return next((number for number in found if isinstance(number, int) and number > 0), None)


def _positions(config: Any, record: PassRecord) -> str:
    if record.positions is not None:
        return "learned"
    if record.angles or record.rotated or getattr(config, "rotary_dim", None):
        return "rotary"
    is_alibi = getattr(config, "alibi", None) or config.model_type in ("bloom", "mpt")
    return "alibi" if is_alibi else "unknown"


def _hyperparameters(model: PreTrainedModel) -> dict[str, object]:
    # Through JSON: values as the file has them. What every config has (labels, what to return) shapes no decoder.
    fields = json.loads(model.config.to_json_string(use_diff=False))
    common = {*vars(PreTrainedConfig()), "auto_map", "_name_or_path", "transformers_version"} - {"tie_word_embeddings"}
    return {name: value for name, value in fields.items() if name not in common}


def versions() -> dict[str, str]:
    """Of what decides the numbers; and the processor."""
    import tercet

    return {
        "tercet": tercet.__version__,
        "torch": version("torch"),
        "transformers": version("transformers"),
        "processor": processor_name(),
    }


def name_of(model: PreTrainedModel) -> str:
    """The last part of the folder that a model came from, or its class."""
    parts: Sequence[str] = [part for part in str(model.config.name_or_path or "").split("/") if part]
    return parts[-1] if parts else type(model).__name__

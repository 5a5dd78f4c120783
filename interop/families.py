"""Models of native families in and out, with equal logits: the same weights under other names.

    >>> ours = from_native(AutoModelForCausalLM.from_pretrained("a-llama"))
    >>> native = to_native(ours)  # a LlamaForCausalLM again, bit for bit

Both return a new model that shares no memory with the one given.
"""

import copy
from typing import Any, TypeVar

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init

from tercet.interop.configs import FAMILIES, Family, from_native_config, narrowest_family, to_native_config
from tercet.interop.tensors import native_from_ours, ours_from_native, tensor_table
from tercet.modeling import TercetForCausalLM

_HEAD = "lm_head.weight"
Model = TypeVar("Model", bound=PreTrainedModel)


def from_native(model: PreTrainedModel) -> TercetForCausalLM:
    """A Tercet decoder with the weights of a native model; equal logits, equal generation.

    Generation settings, dtype, device, mode and attention implementation are kept.

    Raises:
        ValueError: The model is of no known family, uses what Tercet has not (names the field), or its tensors are
            not exactly those of its config (lists them).
    """
    family = family_of(model)
    is_tied = has_tied_head(model)
    config = from_native_config(model.config, family, has_tied_head=is_tied)
    ours = _empty_like(model, config)
    assert isinstance(ours, TercetForCausalLM)
    rows = tensor_table(config, family, has_tied_head=is_tied)
    _fill(ours, ours_from_native(_own_tensors(model, is_tied), rows, _shapes(ours, is_tied)))
    return ours


def to_native(model: PreTrainedModel, family: str | None = None) -> PreTrainedModel:
    """A native model with the weights of a Tercet decoder; equal logits, equal generation.

    Args:
        model: A `TercetForCausalLM`, of the package or loaded as remote code.
        family: gpt2, llama, mistral, qwen2, qwen3 or smollm3; None takes the first of these that can express it.

    Raises:
        ValueError: No such family, the family cannot express the model (names the fields), or the model's tensors
            are not exactly those of its config (lists them).
    """
    config: Any = model.config
    if config.model_type != "tercet" or model.get_output_embeddings() is None:
        raise ValueError(f"{type(model).__name__} is no TercetForCausalLM: give one, or convert it by from_native.")
    is_tied = has_tied_head(model)
    target = narrowest_family(config) if family is None else family_named(family)
    native_config = to_native_config(config, target, has_tied_head=is_tied)
    native = _empty_like(model, native_config)
    rows = tensor_table(config, target, has_tied_head=is_tied)
    _fill(native, native_from_ours(_own_tensors(model, is_tied), rows, _shapes(native, is_tied)))
    return native


def family_named(name: str) -> Family:
    """The family of that `model_type`.

    Raises:
        ValueError: There is none; names those that there are.
    """
    if name not in FAMILIES:
        raise ValueError(f"family {name!r} is not known: choose one of {', '.join(FAMILIES)}.")
    return FAMILIES[name]


def family_of(model: PreTrainedModel) -> Family:
    """The family of a native model.

    Raises:
        ValueError: It is of none, or not a causal language model.
    """
    for family in FAMILIES.values():
        if isinstance(model, family.model_class):
            return family
    classes = ", ".join(family.model_class.__name__ for family in FAMILIES.values())
    raise ValueError(f"{type(model).__name__} is of no known family: one of {classes} is needed.")


def has_tied_head(model: PreTrainedModel) -> bool:
    """Whether the output head is the token embedding.

    The weights are asked, not the config: a checkpoint may hold a head of its own although its config ties it, and
    transformers then uses that head.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return head is not None and head.weight is embedding.weight


def _empty_like(model: PreTrainedModel, config: PreTrainedConfig) -> PreTrainedModel:
    """A model of `config` with memory for weights and nothing in it, in the state that `model` is in."""
    with init.no_init_weights():
        empty = AutoModelForCausalLM.from_config(
            config, dtype=model.dtype, attn_implementation=model.config._attn_implementation
        )
    empty.tie_weights()  # which `no_init_weights` leaves out, too; does nothing where the config ties nothing
    empty.generation_config = copy.deepcopy(model.generation_config)
    return empty.to(model.device).train(model.training)


def _own_tensors(model: PreTrainedModel, is_tied: bool) -> dict[str, torch.Tensor]:
    tensors = {name: tensor for name, tensor in model.state_dict().items() if not (is_tied and name == _HEAD)}
    if absent := [name for name, tensor in tensors.items() if tensor.is_meta]:
        raise ValueError(f"{absent[0]} is not in memory (offloaded or on the meta device): load the model whole.")
    return tensors


def _shapes(model: PreTrainedModel, is_tied: bool) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in model.state_dict().items() if not (is_tied and name == _HEAD)}


def _fill(model: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> None:
    """Give the model copies of these tensors, each in its own dtype."""
    # A tied head is the same parameter and comes once.
    parameters = dict(model.named_parameters())
    assert parameters.keys() == tensors.keys(), "the model has tensors that are no parameters"
    for name, tensor in tensors.items():
        parameters[name].data = tensor.detach().clone(memory_format=torch.contiguous_format)

"""What is changed in a graph between torch's exporter and the file: names of sizes, tied weights, traces."""

import re
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import onnx_ir


def name_sizes(model: "onnx_ir.Model") -> None:
    """Give sizes the names that clients know, in place of the symbols of the trace."""
    graph = model.graph
    inputs = {value.name: value for value in graph.inputs}
    ids, past = inputs["input_ids"].shape, inputs["past_key_values.0.key"].shape
    assert ids is not None and past is not None
    names = {str(ids[0]): "batch_size", str(ids[1]): "sequence_length", str(past[2]): "past_sequence_length"}
    symbol = re.compile(r"\b(?:" + "|".join(map(re.escape, names)) + r")\b")
    totals = ("past_sequence_length + sequence_length", "sequence_length + past_sequence_length")
    for value in _values(model):
        if value.shape is None:
            continue
        for axis, size in enumerate(value.shape):
            if isinstance(size, int) or size.value is None:
                continue
            named = symbol.sub(lambda match: names[match.group()], str(size))
            value.shape[axis] = "total_sequence_length" if named in totals else named


def share_tied_weights(model: "onnx_ir.Model") -> None:
    """Keep a tied embedding once: the optimizer has folded its transpose, the output head, into a weight of its own."""
    import onnx_ir

    tables = [node.inputs[0] for node in model.graph if node.op_type == "Gather"]
    for node in list(model.graph):
        weight = node.inputs[1] if node.op_type == "MatMul" else None
        table = next((t for t in tables if weight is not None and t is not None and _is_transpose(t, weight)), None)
        if weight is None or table is None:
            continue
        transpose = onnx_ir.node("Transpose", [table], {"perm": [1, 0]})
        output = transpose.outputs[0]
        output.name, output.shape, output.type = f"{table.name}.transposed", weight.shape, weight.type
        model.graph.insert_before(node, transpose)
        node.replace_input_with(1, output)
        if not weight.uses():
            del model.graph.initializers[str(weight.name)]


def remove_traces(model: "onnx_ir.Model") -> None:
    """Drop torch's notes on where each node came from: more bytes than the graph, and paths of this machine."""
    for noted in (model, model.graph, *model.graph, *_values(model), *model.graph.initializers.values()):
        noted.metadata_props.clear()


def _values(model: "onnx_ir.Model") -> "list[onnx_ir.Value]":
    """Inputs of the graph and what its nodes produce, outputs of the graph included."""
    return [*model.graph.inputs, *(output for node in model.graph for output in node.outputs)]


def _is_transpose(table: "onnx_ir.Value", weight: "onnx_ir.Value") -> bool:
    held, other = table.const_value, weight.const_value
    if held is None or other is None or len(held.shape) != 2 or tuple(held.shape) != tuple(reversed(other.shape)):
        return False
    return np.array_equal(held.numpy().T, other.numpy())

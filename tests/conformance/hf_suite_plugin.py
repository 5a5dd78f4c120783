"""What transformers' tests need to run over Tercet, and a record of every test's outcome; loaded with `-p`.

Written for the harness in $HF_SUITE and a tree of transformers' tests in $HF_TREE; contains none of either.
"""

import json
import os
from pathlib import Path
from unittest import mock

import pytest

_outcomes: list[dict[str, str]] = []


def pytest_runtest_logreport(report):
    # Reports reach this process from xdist's workers, too.
    is_subtest = hasattr(report, "context")
    if report.when != "call" and report.outcome == "passed":
        return
    _outcomes.append(
        {
            "test": report.nodeid.rpartition("::")[2],
            "subtest": str(getattr(report.context, "msg", "")) if is_subtest else "",
            "outcome": report.outcome,
            "reason": report.longrepr[2] if report.outcome == "skipped" and isinstance(report.longrepr, tuple) else "",
        }
    )


def pytest_sessionfinish(session):
    if not hasattr(session.config, "workerinput"):
        Path(os.environ["HF_SUITE_OUTCOMES"]).write_text(json.dumps(_outcomes))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    with _known_cache_type(item), _program_of_an_export(item):
        return (yield)


def _known_cache_type(item):
    """That test looks only at models whose cache is exactly one of two types; here ours is the one it knows."""
    if not item.name.startswith("test_bc_cache_name_forward") or not os.environ["EXT_LM"].startswith("tercet."):
        return mock.MagicMock()
    from tercet.modeling import TercetCache

    return mock.patch("transformers.cache_utils.DynamicCache", TercetCache)


def _program_of_an_export(item):
    """Tests from before 5.24 expect a program that runs of the exporter, where 5.24 returns a graph in a model."""
    if not item.name.startswith("test_onnx_export"):
        return mock.MagicMock()
    from transformers.exporters import OnnxExporter

    export = OnnxExporter.export
    return mock.patch.object(OnnxExporter, "export", lambda *args, **kwargs: _Program(export(*args, **kwargs).program))


class _Program:
    """An ONNX graph as those tests use it: called with tensors by name, it runs in onnxruntime."""

    def __init__(self, graph) -> None:
        import onnx_ir
        import onnxruntime

        self.model_proto = onnx_ir.to_proto(graph)
        self._session = onnxruntime.InferenceSession(self.model_proto.SerializeToString())

    def __call__(self, **inputs):
        import torch

        # Where an output has the name of an input, a prefix tells them apart.
        names = [taken.name for taken in self._session.get_inputs()]
        feeds = {name: inputs[name.removeprefix("input.")].numpy() for name in names}
        return [torch.from_numpy(output) for output in self._session.run(None, feeds)]

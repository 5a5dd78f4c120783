"""The ONNX graph in onnxruntime is the model: prompts, parts of prompts, decoding; padded rows; other sizes."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tercet.interop import onnx as interop_onnx
from tercet.interop.onnx import write_onnx
from tercet.modeling import TercetConfig, TercetForCausalLM
from tercet.training.errors import UserError

pytest.importorskip("onnx", reason="needs the extra `interop`: onnx is not installed")
pytest.importorskip("onnxscript", reason="needs the extra `interop`: onnxscript is not installed")
ort = pytest.importorskip("onnxruntime", reason="needs the extra `interop`: onnxruntime is not installed")

TOLERANCE = 1e-4
VOCAB_SIZE = 1024
_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
}
# An export takes seconds a layer: one where layers are alike, and a sliding one with RoPE under a full one without.
_MIXED: dict[str, Any] = {
    "num_hidden_layers": 2,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
    "no_rope_layers": [1, 0],
}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "modern": lambda: TercetForCausalLM(TercetConfig.modern(**_SMALL, num_hidden_layers=1, num_key_value_heads=2)),
    "classic": lambda: TercetForCausalLM(TercetConfig.classic(**_SMALL, num_hidden_layers=1)),
    "mixed": lambda: TercetForCausalLM(TercetConfig.modern(**_SMALL, **_MIXED)),
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(**_SMALL, num_hidden_layers=2, num_key_value_heads=2, intermediate_size=48)
    ),
}
# Rows of one batch, left-padded to the longest; the shortest prompt has chunks without any token of its own.
PROMPT_LENGTHS = {1: [11], 3: [11, 7, 2]}


@dataclass
class Graph:
    """A session of onnxruntime with the cache that its last step returned."""

    path: Path
    cache: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = ort.InferenceSession(self.path, options, providers=["CPUExecutionProvider"])

    def forget(self, batch_size: int) -> None:
        """Start with an empty past."""
        self.cache = {
            given.name: torch.zeros(batch_size, given.shape[1], 0, given.shape[3]).numpy()
            for given in self.session.get_inputs()
            if given.name.startswith("past_key_values.")
        }

    def step(self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits (B, T, V) of T new tokens."""
        inputs = {"input_ids": ids.numpy(), "attention_mask": mask.numpy(), "position_ids": positions.numpy()}
        names = [output.name for output in self.session.get_outputs()]
        outputs = dict(zip(names, self.session.run(names, {**inputs, **self.cache}), strict=True))
        logits = outputs.pop("logits")
        self.cache = {name.replace("present.", "past_key_values."): value for name, value in outputs.items()}
        return torch.from_numpy(logits)


@dataclass
class Exported:
    model: PreTrainedModel
    graph: Graph


@pytest.fixture(scope="module", params=sorted(MODELS))
def exported(request, tmp_path_factory, small_tokenizer) -> Exported:
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    model = MODELS[request.param]().eval()
    if request.param == "mixed":  # half precision is written as float32, too
        model.to(torch.bfloat16)
    model.save_pretrained(folder / "checkpoint")
    # Read again: rounding to half precision and back has changed the frequencies of RoPE, which are in no file.
    model = AutoModelForCausalLM.from_pretrained(folder / "checkpoint", dtype=torch.float32).eval()
    small_tokenizer.save_pretrained(folder / "checkpoint")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "llama":  # as if it were beyond what one file holds
            patch.setattr(interop_onnx, "_MAX_INLINE_BYTES", 0)
        return Exported(model, Graph(write_onnx(folder / "checkpoint", folder / "onnx")))


def padded_prompts(batch_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, mask and positions of left-padded rows, (B, T) each."""
    lengths = torch.tensor(PROMPT_LENGTHS[batch_size])[:, None]
    num_tokens = int(lengths.max())
    mask = (torch.arange(num_tokens) >= num_tokens - lengths).long()
    ids = torch.randint(2, VOCAB_SIZE, (batch_size, num_tokens), generator=torch.Generator().manual_seed(0)) * mask
    return ids, mask, (mask.cumsum(-1) - 1).clamp(min=0)


def max_delta(logits: torch.Tensor, expected: torch.Tensor, mask: torch.Tensor) -> float:
    """Largest difference at real positions; of padding the graph has only to be finite."""
    assert logits.isfinite().all()
    return ((logits - expected).abs().amax(-1) * mask).max().item()


@pytest.mark.parametrize("batch_size", [1, 3])
@torch.no_grad()
def test_prefill_and_ten_decode_steps(exported, batch_size):
    assert decode_delta(exported, batch_size) <= TOLERANCE


def decode_delta(exported: Exported, batch_size: int) -> float:
    """Both decode greedily, each its own tokens: the largest difference of logits."""
    model, graph = exported.model, exported.graph
    ids, mask, positions = padded_prompts(batch_size)
    outputs: Any = model(ids, attention_mask=mask, position_ids=positions, use_cache=True)
    graph.forget(batch_size)
    logits = graph.step(ids, mask, positions)
    delta = max_delta(logits, outputs.logits, mask)
    for _ in range(10):
        token = outputs.logits[:, -1:].argmax(-1)
        assert torch.equal(logits[:, -1:].argmax(-1), token)
        mask = torch.cat([mask, mask.new_ones(batch_size, 1)], dim=-1)
        positions = mask.sum(-1, keepdim=True) - 1
        outputs = model(token, attention_mask=mask, position_ids=positions, cache=outputs.cache, use_cache=True)
        logits = graph.step(token, mask, positions)
        delta = max(delta, max_delta(logits, outputs.logits, mask[:, -1:]))
    return delta


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("chunks", [(5, 6), (1, 9, 1), (1,) * 11], ids=str)
@torch.no_grad()
def test_a_prompt_in_chunks(exported, batch_size, chunks):
    ids, mask, positions = padded_prompts(batch_size)
    expected = exported.model(ids, attention_mask=mask, position_ids=positions).logits
    exported.graph.forget(batch_size)
    start = 0
    for length in chunks:
        new = slice(start, start + length)
        logits = exported.graph.step(ids[:, new], mask[:, : new.stop], positions[:, new])
        assert max_delta(logits, expected[:, new], mask[:, new]) <= TOLERANCE
        start += length


@torch.no_grad()
def test_generates_the_same_tokens(exported):
    """As a user would: `generate()` on one side, a greedy loop around the graph on the other."""
    ids, mask, positions = padded_prompts(3)
    exported.graph.forget(3)
    expected = exported.model.generate(
        ids, attention_mask=mask, max_new_tokens=10, min_new_tokens=10, do_sample=False, pad_token_id=0,
        eos_token_id=None,
    )  # fmt: skip
    logits, tokens = exported.graph.step(ids, mask, positions), []
    for _ in range(10):
        tokens.append(logits[:, -1:].argmax(-1))
        mask = torch.cat([mask, mask.new_ones(3, 1)], dim=-1)
        logits = exported.graph.step(tokens[-1], mask, mask.sum(-1, keepdim=True) - 1)
    assert torch.equal(torch.cat(tokens, dim=-1), expected[:, ids.shape[1] :])


@pytest.mark.parametrize(("batch_size", "num_tokens"), [(1, 1), (4, 1), (1, 200), (2, 64)])
@torch.no_grad()
def test_sizes_unlike_the_example(exported, batch_size, num_tokens):
    ids = torch.randint(2, VOCAB_SIZE, (batch_size, num_tokens), generator=torch.Generator().manual_seed(2))
    mask, positions = torch.ones_like(ids), torch.arange(num_tokens).expand(batch_size, -1)
    exported.graph.forget(batch_size)
    logits = exported.graph.step(ids, mask, positions)
    assert max_delta(logits, exported.model(ids).logits, mask) <= TOLERANCE


def test_names_that_clients_know(exported):
    session = exported.graph.session
    assert {given.type for given in session.get_inputs()} == {"tensor(int64)", "tensor(float)"}
    sizes = {given.name: given.shape for given in [*session.get_inputs(), *session.get_outputs()]}
    heads, layers = exported.model.config.num_key_value_heads, range(exported.model.config.num_hidden_layers)
    past = ["batch_size", heads, "past_sequence_length", 8]
    present = ["batch_size", heads, "total_sequence_length", 8]
    assert sizes == {
        "input_ids": ["batch_size", "sequence_length"],
        "attention_mask": ["batch_size", "total_sequence_length"],
        "position_ids": ["batch_size", "sequence_length"],
        "logits": ["batch_size", "sequence_length", VOCAB_SIZE],
        **{f"past_key_values.{i}.{part}": past for i in layers for part in ("key", "value")},
        **{f"present.{i}.{part}": present for i in layers for part in ("key", "value")},
    }


def test_the_folder_is_complete(exported, small_tokenizer):
    folder = exported.graph.path.parent
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == small_tokenizer.get_vocab()
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == exported.model.config.model_type
    for code in {name.partition(".")[0] for name in config.get("auto_map", {}).values()}:
        assert (folder / f"{code}.py").is_file()
    assert (folder / "generation_config.json").is_file()
    assert not list(folder.parent.glob(".writing-*"))
    num_bytes = sum(weight.nbytes for weight in exported.model.parameters())  # tied weights are counted once here
    data = folder / "model.onnx.data"
    assert data.is_file() == (exported.model.config.model_type == "llama")
    written = sum(path.stat().st_size for path in folder.glob("model.onnx*"))
    assert num_bytes <= written <= num_bytes + 60_000
    assert b"site-packages" not in exported.graph.path.read_bytes()


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    torch.manual_seed(0)
    MODELS["modern"]().save_pretrained(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def test_refuses_a_folder_that_holds_something(checkpoint, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match=r"notes is not empty \(mine\.txt\): choose another"):
        write_onnx(checkpoint, tmp_path / "notes")
    with pytest.raises(UserError, match=r"mine\.txt is a file"):
        write_onnx(checkpoint, tmp_path / "notes" / "mine.txt")
    assert (tmp_path / "notes" / "mine.txt").read_text() == "mine"


def test_refuses_what_is_no_checkpoint(tmp_path):
    with pytest.raises(UserError, match=r"no config\.json"):
        write_onnx(tmp_path, tmp_path / "onnx")


def test_refuses_a_truncated_checkpoint(checkpoint, tmp_path):
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(UserError, match="does not load"):
        write_onnx(checkpoint, tmp_path / "onnx")


def test_refuses_rope_that_changes_with_the_length(checkpoint, tmp_path):
    config = json.loads((checkpoint / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="rope_type 'dynamic'"):
        write_onnx(checkpoint, tmp_path / "onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_a_full_disk_leaves_nothing(checkpoint, tmp_path, monkeypatch):
    class Program:
        def save(self, *args: Any, **kwargs: Any) -> None:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(interop_onnx, "_convert", lambda model: Program())
    monkeypatch.setattr(interop_onnx, "_num_weight_bytes", lambda program: 0)
    with pytest.raises(OSError, match="No space left"):
        write_onnx(checkpoint, tmp_path / "onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_says_which_packages_are_needed(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(interop_onnx.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"onnx and onnxscript: pip install 'tercet\[interop\]'"):
        write_onnx(checkpoint, tmp_path / "onnx")

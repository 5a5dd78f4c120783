"""One training step beside `LlamaForCausalLM` of the same shape, in one interleaved run: tokens/s and peak memory.

    python benchmarks/train_step.py [--json FILE]

Speed: both models take turns, step by step, on the same batch with the same fused AdamW; medians, and the spread as the
10th and 90th percentile. Llama trains as a plain loop does: labels in, logits out. Memory: each model in a process of
its own that takes two steps; the peak of its resident memory, less what it held before the first step. Linux only.
"""

import argparse
import json
import multiprocessing
import statistics
import time
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tercet.modeling import TercetConfig, TercetForCausalLM
from tercet.training.hardware import processor_name


@dataclass(frozen=True)
class Shape:
    """A model and a batch."""

    vocab_size: int
    batch_size: int
    sequence_length: int
    hidden_size: int = 384
    intermediate_size: int = 1024
    num_hidden_layers: int = 6
    num_attention_heads: int = 6
    num_key_value_heads: int = 2


SPEED = Shape(vocab_size=8192, batch_size=8, sequence_length=256)
MEMORY = Shape(vocab_size=49_152, batch_size=8, sequence_length=1024)
NAMES = ("tercet", "llama")


def make_model(name: str, shape: Shape) -> PreTrainedModel:
    """The same decoder twice: Tercet without QK-norm is Llama, tied embeddings in both."""
    fields = {key: value for key, value in asdict(shape).items() if key not in ("batch_size", "sequence_length")}
    shared = {**fields, "max_position_embeddings": shape.sequence_length, "tie_word_embeddings": True}
    torch.manual_seed(0)
    if name == "llama":
        return LlamaForCausalLM(LlamaConfig(**shared)).train()
    return TercetForCausalLM(TercetConfig(**shared, qk_norm=False)).train()


class Trainee:
    """A model, its optimizer and its batch; `step()` takes one training step."""

    def __init__(self, name: str, shape: Shape) -> None:
        self.model = make_model(name, shape)
        # As each is trained in practice: Tercet's loop asks for the loss only, a plain loop gets logits with it.
        self.arguments = {"skip_logits": True, "use_cache": False} if name == "tercet" else {"use_cache": False}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.ids = torch.randint(0, shape.vocab_size, (shape.batch_size, shape.sequence_length))

    def step(self) -> float:
        """Seconds of one step."""
        started = time.perf_counter()
        self.model(input_ids=self.ids, labels=self.ids, **self.arguments).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - started


def compare_speed(shape: Shape, num_steps: int) -> dict[str, dict[str, float]]:
    """Tokens per second of each model, interleaved: median, 10th and 90th percentile."""
    trainees = {name: Trainee(name, shape) for name in NAMES}
    times: dict[str, list[float]] = {name: [] for name in NAMES}
    for step in range(num_steps + 2):
        for name in NAMES if step % 2 else reversed(NAMES):
            duration = trainees[name].step()
            if step >= 2:
                times[name].append(duration)
    tokens = shape.batch_size * shape.sequence_length
    rows = {}
    for name, values in times.items():
        deciles = statistics.quantiles(values, n=10)
        rows[name] = {
            "median": tokens / statistics.median(values), "low": tokens / deciles[-1], "high": tokens / deciles[0],
        }  # fmt: skip
    ratios = [llama / tercet for tercet, llama in zip(times["tercet"], times["llama"], strict=True)]
    rows["ratio"] = {"median": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}
    return rows


def peak_bytes(name: str, shape: Shape) -> int:
    """Bytes that two training steps add to a process at their peak."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_measure_peak, (name, shape))


def _measure_peak(name: str, shape: Shape) -> int:
    trainee = Trainee(name, shape)
    # A child starts with its parent's high-water mark (and getrusage keeps it); 5 resets the one in /proc.
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_kib("VmRSS")
    for _ in range(2):
        trainee.step()
    return (_status_kib("VmHWM") - before) * 1024


def _status_kib(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def main() -> None:
    """Measure speed, then memory, and print both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=15, help="timed steps of each model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the numbers here, too")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"{processor_name()}, {arguments.threads} threads, torch {torch.__version__}, {date.today()}")
    speed = compare_speed(SPEED, arguments.steps)
    print(f"\nhidden 384, 6 layers, 6/2 heads, vocabulary {SPEED.vocab_size}, 8 x {SPEED.sequence_length}")
    for name in NAMES:
        row = speed[name]
        print(f"  {name:<8} {row['median']:8.0f} tokens/s   (10-90 %: {row['low']:.0f} to {row['high']:.0f})")
    ratio = speed["ratio"]
    print(f"  tercet / llama {ratio['median']:.3f}   (pairs: {ratio['low']:.3f} to {ratio['high']:.3f})")
    memory = {}
    for shape in (SPEED, MEMORY):
        peaks = {name: peak_bytes(name, shape) for name in NAMES}
        memory[f"{shape.vocab_size}x{shape.batch_size}x{shape.sequence_length}"] = peaks
        print(
            f"peak of a step, vocabulary {shape.vocab_size}, {shape.batch_size} x {shape.sequence_length}: "
            f"tercet {peaks['tercet'] / 2**20:.0f} MiB, llama {peaks['llama'] / 2**20:.0f} MiB, "
            f"ratio {peaks['tercet'] / peaks['llama']:.3f}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps({"speed": speed, "peak_bytes": memory}, indent=2) + "\n")


if __name__ == "__main__":
    main()

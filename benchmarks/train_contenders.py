"""Who trains in benchmarks/train.py: each in a process of its own, which takes one step whenever it is told to.

The same shape, data and optimizer for all; in the process, whatever its own way of training sets up, and nothing else.
"""

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Shape:
    """A model and a batch."""

    vocab_size: int
    batch_size: int
    sequence_length: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int

    def model_fields(self) -> dict[str, Any]:
        """As both kinds of config name them: Tercet without QK-norm is Llama; embeddings are tied in both."""
        fields = {key: value for key, value in asdict(self).items() if key not in ("batch_size", "sequence_length")}
        return {**fields, "max_position_embeddings": self.sequence_length, "tie_word_embeddings": True}


NAMES = {
    "tercet": "Tercet, its own step",
    "llama": "Llama, plain loop",
    "trainer": "Llama, Trainer",
    "tercet-compiled": "Tercet, training.compile",
    "llama-compiled": "Llama, torch.compile",
    "tercet-muon": "Tercet, Muon for matrices",
    "tercet-bf16": "Tercet, training.precision: bfloat16",
    "llama-bf16": "Llama, autocast to bfloat16",
}


class Contender:
    """A process that trains, and stands still between two steps."""

    def __init__(self, name: str, shape: Shape, data: Path, num_threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(name, shape, data, num_threads, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def step(self) -> tuple[float, float]:
        """Seconds of a step, and its loss."""
        self._pipe.send("step")
        return self._pipe.recv()

    def turn(self, seconds: float) -> float:
        """Mean seconds of a turn's steps but the first, which finds everything asleep."""
        self.step()
        durations = [self.step()[0]]
        while sum(durations) < seconds:
            durations.append(self.step()[0])
        return sum(durations) / len(durations)

    def close(self) -> int:
        """End the process; the bytes that its steps added to it at their peak."""
        self._pipe.send("end")
        peak = self._pipe.recv()
        self._process.join()
        return peak


def _work(name: str, shape: Shape, data: Path, num_threads: int, pipe: Connection) -> None:
    import torch

    torch.set_num_threads(num_threads)
    torch.manual_seed(0)
    before: list[int] = []

    def wait() -> bool:
        if not before:
            # A child starts with its parent's high-water mark (and getrusage keeps it); 5 resets the one in /proc.
            Path("/proc/self/clear_refs").write_text("5")
            before.append(_status_kib("VmRSS"))
        return pipe.recv() == "step"

    runners: dict[str, Callable] = {"tercet": _tercet, "trainer": _trainer, "llama": _plain_loop}
    with contextlib.suppress(EOFError):
        runners[name.partition("-")[0]](name, shape, data, wait, lambda *measured: pipe.send(measured))
        pipe.send((_status_kib("VmHWM") - before[0]) * 1024)


def _status_kib(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def _batches(shape: Shape, data: Path) -> Iterator[list[dict[str, Any]]]:
    from tercet.training.batches import PackedBatches
    from tercet.training.packing import PackedDataset, pack
    from tercet.training.token_set import PreparedData

    train = PreparedData.open(data).train
    dataset = PackedDataset(train, pack(train.document_lengths, shape.sequence_length), eos_token_id=0, pad_token_id=1)
    batches = PackedBatches(
        dataset, seed=0, global_batch_size=shape.batch_size, per_device_batch_size=shape.batch_size, rank=0,
        world_size=1,
    )  # fmt: skip
    return batches.steps(0, 1_000_000)


def _tercet(name: str, shape: Shape, data: Path, wait: Callable, tell: Callable) -> None:
    from accelerate import Accelerator

    from tercet.modeling import TercetConfig, TercetForCausalLM
    from tercet.training.acceleration import compile_model
    from tercet.training.allocator import keep_freed_memory
    from tercet.training.optimizers import make_optimizers
    from tercet.training.step import training_step

    keep_freed_memory()
    model = TercetForCausalLM(TercetConfig(**shape.model_fields(), qk_norm=False)).train()
    optimizers = make_optimizers(
        model, name="muon" if name.endswith("muon") else "adamw", learning_rate=LEARNING_RATE,
        matrix_learning_rate=0.02, weight_decay=0.01, embedding_weight_decay=0.01, betas=(0.9, 0.999),
    )  # fmt: skip
    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if name.endswith("bf16") else "no")
    trained = accelerator.prepare(compile_model(model, lambda line: None) if name.endswith("compiled") else model)
    batches = _batches(shape, data)
    while wait():
        micro_batches = next(batches)
        started = time.perf_counter()
        result = training_step(trained, optimizers, micro_batches, accelerator, clip_norm=1.0)
        tell(time.perf_counter() - started, float(result.loss_nats))


def _llama(shape: Shape) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**shape.model_fields())).train()


def _plain_loop(name: str, shape: Shape, data: Path, wait: Callable, tell: Callable) -> None:
    import torch

    model = _llama(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    trained = torch.compile(model, dynamic=False) if name.endswith("compiled") else model
    batches = _batches(shape, data)
    while wait():
        (batch,) = next(batches)
        started = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=name.endswith("bf16")):
            loss = trained(input_ids=batch["input_ids"], labels=batch["input_ids"], use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        tell(time.perf_counter() - started, float(loss.detach()))


def _trainer(name: str, shape: Shape, data: Path, wait: Callable, tell: Callable) -> None:
    import tempfile

    from torch.utils.data import IterableDataset
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Rows(IterableDataset):
        def __iter__(self) -> Iterator[dict[str, Any]]:
            for (batch,) in _batches(shape, data):
                for ids in batch["input_ids"]:
                    yield {"input_ids": ids, "labels": ids}

    class OneByOne(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if not wait():
                raise StopIteration
            self.started = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            tell(time.perf_counter() - self.started, float("nan"))

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, use_cpu=True, max_steps=1_000_000, per_device_train_batch_size=shape.batch_size,
            learning_rate=LEARNING_RATE, lr_scheduler_type="constant", optim="adamw_torch_fused", max_grad_norm=1.0,
            save_strategy="no", logging_strategy="no", report_to=[], disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(model=_llama(shape), args=arguments, train_dataset=Rows(), callbacks=[OneByOne()])
        with contextlib.suppress(StopIteration):
            trainer.train()


__all__ = ["NAMES", "Contender", "Shape"]

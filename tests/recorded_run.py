"""A training run in which each process writes down what its model is given to learn from.

Under torchrun, `recorded_run.py RECORDS RECIPE --output FOLDER` is `tercet train RECIPE --output FOLDER`, and appends
every batch to a file of this process in RECORDS as it is learned from, so that a kill loses none. `trained_labels`
reads them. torch's own hook on all modules sees the batches, below the loop, its launcher and DDP.
"""

import json
import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook


def record_batches(path: Path) -> None:
    """Append the inputs and labels of every batch that a model is given in training, a line for each."""
    from tercet.modeling import TercetForCausalLM

    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

    def write(module: torch.nn.Module, _: Any, arguments: dict[str, Any], __: Any) -> None:
        if isinstance(module, TercetForCausalLM) and module.training and torch.is_grad_enabled():
            line = json.dumps([arguments[name].flatten().tolist() for name in ("input_ids", "shift_labels")]) + "\n"
            assert os.write(file, line.encode()) == len(line)  # in one call: a kill leaves no half of it

    register_module_forward_hook(write, with_kwargs=True)


def trained_labels(
    records: Path, rank: int, begun_at: list[int], num_steps: int, batches_a_step: int, eos_token_id: int
) -> list[int]:
    """The labels of all steps that the weights at the end have learned from, in their order.

    Args:
        begun_at: Step at which the run began in each of its lives; what it did behind the next of them was lost.
        num_steps: Of the run.
        batches_a_step: Of each process.
    """
    labels: list[int] = []
    for life, (begin, end) in enumerate(pairwise([*begun_at, num_steps])):
        lines = (records / f"{life}-{rank}.jsonl").read_text().splitlines()
        kept = lines[: (end - begin) * batches_a_step]
        assert len(kept) == (end - begin) * batches_a_step
        assert len(lines) == len(kept) or life < len(begun_at) - 1
        for line in kept:
            inputs, of_batch = json.loads(line)
            # What is read before a label is the token before it, over the ends of batches and of lives.
            assert inputs == [labels[-1] if labels else eos_token_id, *of_batch[:-1]]
            labels += of_batch
    return labels


if __name__ == "__main__":
    records, rank = Path(sys.argv.pop(1)), int(os.environ["RANK"])
    records.mkdir(parents=True, exist_ok=True)
    life = len(list(records.glob(f"*-{rank}.jsonl")))
    record_batches(records / f"{life}-{rank}.jsonl")
    from tercet.cli import run_command

    run_command("train")

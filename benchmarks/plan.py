"""The memory that `tercet plan` estimates beside the peak of a process that takes the steps: a table, or JSON.

    python benchmarks/plan.py [--json]

Each shape runs in a process of its own on the CPU; measured is its largest resident memory less that before the model
was made. Figures of 2 cores (AMD EPYC) are in docs/plan-and-eval.md.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

_SMALL = ["training.global_batch_size=8", "training.device=cpu", "data.path=python-docs"]
SHAPES: dict[str, list[str]] = {
    "15.7 M, 8 x 512": [*_SMALL],
    "6 layers of 384, 8 x 256": [*_SMALL, "training.sequence_length=256", "model.num_hidden_layers=6"],
    "4 layers of 128, vocabulary 49152, 8 x 1024": [
        *_SMALL, "model.hidden_size=128", "model.num_attention_heads=2", "model.num_key_value_heads=2",
        "model.num_hidden_layers=4", "model.intermediate_size=384", "tokenizer.vocab_size=49152",
        "training.sequence_length=1024",
    ],
    "8 layers of 768, 2 x 128": [
        *_SMALL, "training.global_batch_size=2", "training.per_device_batch_size=2", "training.sequence_length=128",
        "model.hidden_size=768", "model.num_attention_heads=12", "model.num_key_value_heads=4",
        "tokenizer.vocab_size=32768",
    ],
}  # fmt: skip


def measure(overrides: list[str]) -> dict[str, Any]:
    """Estimated and measured bytes of one shape; the process must be new."""
    import torch

    from tercet.training.memory import MemoryMeter, make_step_model, run_step, step_memory
    from tercet.training.optimizers import optimizers_of_recipe
    from tercet.training.recipe import load_recipe

    recipe = load_recipe("small", overrides)
    config, training = recipe.model_config_for(recipe.tokenizer.vocab_size, {}), recipe.training
    estimated = step_memory(recipe, config)
    square = torch.ones(512, 512, requires_grad=True)
    (square @ square).sum().backward()  # what the libraries load with their first product
    before = _resident("VmRSS")
    model = make_step_model(recipe, config)
    optimizers = optimizers_of_recipe(recipe.optimizer, model)
    ids = torch.randint(config.vocab_size, (training.per_device_batch_size, training.sequence_length))
    positions = torch.arange(training.sequence_length) % (training.sequence_length // 2)
    batch = {"input_ids": ids, "shift_labels": ids, "position_ids": positions.expand_as(ids)}
    for _ in range(2):
        run_step(model, optimizers, batch, 1, bfloat16=False, meter=MemoryMeter())
    return {"estimated": estimated.peak, "measured": _resident("VmHWM") - before}


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def main() -> None:
    """Measure every shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", nargs="*", metavar="KEY=VALUE", help="measure one shape in this process")
    arguments = parser.parse_args()
    if arguments.one is not None:
        print(json.dumps(measure(arguments.one)))
        return
    rows = []
    for shape, overrides in SHAPES.items():
        done = subprocess.run(
            [sys.executable, __file__, "--one", *overrides], capture_output=True, text=True, check=True
        )
        rows.append({"shape": shape, **json.loads(done.stdout.strip().splitlines()[-1])})
        if not arguments.json:
            row = rows[-1]
            ratio = row["estimated"] / row["measured"]
            print(f"{shape:<46}{row['estimated'] / 2**20:>8.0f} MiB{row['measured'] / 2**20:>8.0f} MiB{ratio:>7.2f}")
    if arguments.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()

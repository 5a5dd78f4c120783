"""How good a model a fixed time of training buys: bits per byte on held-out text after N seconds.

    python benchmarks/quality.py FILE --seconds 60

The last tenth of FILE is held out, whole and unshuffled; every byte of it is scored, counted as UTF-8. The clock counts
training steps only, the first one included: not the tokenizer, not packing, not evaluation.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

# Set before torch is imported: idle threads go to sleep between operators otherwise, and these are short.
os.environ.setdefault("OMP_WAIT_POLICY", "ACTIVE")
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from transformers import PreTrainedTokenizerFast

from tercet.modeling import TercetForCausalLM
from tercet.tokenizer import token_ids, train_tokenizer
from tercet.training.allocator import keep_freed_memory
from tercet.training.batches import PackedBatches
from tercet.training.documents import Document
from tercet.training.evaluation import evaluate
from tercet.training.optimizers import optimizers_of_recipe
from tercet.training.packing import PackedDataset, pack
from tercet.training.recipe import Recipe, load_recipe
from tercet.training.schedules import learning_rate_factor
from tercet.training.shards import PreparedData, prepare
from tercet.training.split import split_tail
from tercet.training.step import set_learning_rates, training_step


def main() -> None:
    """Read the arguments, prepare the text, train, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--seconds", type=float, help="training time")
    budget.add_argument("--steps", type=int, help="so many steps instead: for comparing what no clock should decide")
    parser.add_argument("--recipe", default="shakespeare", help="a recipe's name or file (default: shakespeare)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a recipe's value")
    parser.add_argument("--evaluations", type=int, default=4, help="how many results to print")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    overrides = [f"data.path={arguments.file}", "data.split_by=tail", "data.validation_fraction=0.1", *arguments.set]
    recipe = load_recipe(arguments.recipe, overrides)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer, data = prepare_text(arguments.file, recipe, Path(folder))
        print(
            f"train {data.train.num_bytes} bytes, {data.train.num_tokens} tokens; "
            f"validation {data.validation.num_bytes} bytes, {data.validation.num_tokens} tokens"
        )
        train_for(arguments.seconds or arguments.steps, bool(arguments.steps), recipe, tokenizer, data,
            arguments.evaluations)  # fmt: skip


def prepare_text(file: Path, recipe: Recipe, folder: Path) -> tuple[PreTrainedTokenizerFast, PreparedData]:
    """Train the tokenizer on the training part only, and tokenize both."""
    text = file.read_bytes().decode("utf-8")
    fraction = recipe.data.validation_fraction
    settings = recipe.tokenizer
    tokenizer = train_tokenizer([split_tail(text, fraction)[0]], settings.vocab_size, words=settings.words)
    data = prepare(
        [Document(text, file.name)], tokenizer, folder,
        validation_fraction=fraction, split_by="tail", drop_duplicates=False, progress=False,
    )  # fmt: skip
    return tokenizer, data


def train_for(
    budget: float,
    counts_steps: bool,
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerFast,
    data: PreparedData,
    num_evaluations: int,
) -> None:
    """Train until the clock of training steps shows `budget` seconds, or for so many steps; the schedule runs on it."""
    set_seed(recipe.seed)
    accelerator = Accelerator(cpu=recipe.training.device != "cuda")
    model = TercetForCausalLM(recipe.model_config_for(len(tokenizer), token_ids(tokenizer)._asdict()))
    training, optimizer = recipe.training, recipe.optimizer
    optimizers = optimizers_of_recipe(optimizer, model)
    eos_token_id, pad_token_id = token_ids(tokenizer)[1:]
    dataset = PackedDataset(data.train, pack(data.train.document_lengths, training.sequence_length),
        eos_token_id=eos_token_id, pad_token_id=pad_token_id)  # fmt: skip
    batches = PackedBatches(
        dataset, seed=recipe.seed, global_batch_size=training.global_batch_size,
        per_device_batch_size=training.per_device_batch_size, rank=0, world_size=1,
    )  # fmt: skip
    print(
        f"{model.num_parameters():,} parameters, "
        f"{training.global_batch_size} x {training.sequence_length} tokens a step, {torch.get_num_threads()} threads"
    )
    trained_s, step, marks = 0.0, 0, [budget * (i + 1) / num_evaluations for i in range(num_evaluations)]
    spent, step_costs = 0.0, 1.0 if counts_steps else budget / 1000
    model.train()
    while marks:
        started = time.perf_counter()
        factor = learning_rate_factor(
            spent, budget, schedule=optimizer.schedule, warmup=optimizer.warmup_steps * step_costs,
            decay_fraction=optimizer.decay_fraction, final_fraction=optimizer.final_fraction,
        )  # fmt: skip
        set_learning_rates(optimizers, max(factor, 1e-3))
        training_step(
            model, optimizers, batches.micro_batches(step), accelerator,
            clip_norm=optimizer.clip_norm, z_loss=optimizer.z_loss,
        )  # fmt: skip
        step += 1
        trained_s += time.perf_counter() - started
        spent = step if counts_steps else trained_s
        step_costs = spent / step
        # The last step may not begin if it would end late by more than half of itself.
        if spent + (step_costs / 2 if len(marks) == 1 and not counts_steps else 0) >= marks[0]:
            marks.pop(0)
            result = evaluate(
                model,
                data.validation,
                sequence_length=training.sequence_length,
                stride=training.sequence_length // 4,
                eos_token_id=eos_token_id,
                pad_token_id=pad_token_id,
            )
            tokens = step * training.global_batch_size * training.sequence_length
            print(
                f"seconds={trained_s:.1f} bits_per_byte={result.bits_per_byte:.4f} steps={step} "
                f"tokens_per_second={tokens / trained_s:.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()

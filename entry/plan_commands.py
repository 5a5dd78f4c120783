"""`tercet plan`: a recipe's figures as tables, or as JSON, and a refusal of what cannot fit."""

import json
from pathlib import Path

import typer
from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from tercet.tokenizer_commands import parse_size
from tercet.training.errors import UserError
from tercet.training.from_checkpoint import FROM_CHECKPOINT
from tercet.training.mixture import MAX_USEFUL_EPOCHS
from tercet.training.plan import TOKENS_PER_PARAMETER, Plan, gibibytes, make_plan
from tercet.training.plan_machine import other_machine, this_machine
from tercet.training.preparation import load_tokenizer
from tercet.training.recipe import Recipe, load_recipe
from tercet.training.starting_weights import starting_tokenizer


def run_plan(
    recipe_name: str,
    overrides: list[str],
    output: Path | None,
    *,
    num_processes: int,
    device_memory: str | None,
    peak_flops: float | None,
    mfu: float | None,
    timed: bool,
    as_json: bool,
) -> None:
    """`tercet plan`.

    Raises:
        UserError: What cannot fit, after the plan has been shown.
    """
    if mfu is not None and peak_flops is None:
        raise UserError("--mfu is a part of --peak-flops: give that, too")
    recipe = load_recipe(recipe_name, overrides)
    folder = (output or Path(recipe.output_dir)).expanduser()
    if device_memory is None:
        machine = this_machine(recipe, folder)
    else:
        machine = other_machine(recipe, parse_size(device_memory, "--device-memory"))
    vocab_size = recipe.tokenizer.vocab_size
    if recipe.model.get(FROM_CHECKPOINT) is not None:
        vocab_size = len(starting_tokenizer(recipe)[0])
    elif recipe.tokenizer.path is not None:
        vocab_size = len(load_tokenizer(recipe.tokenizer.path))
    plan = make_plan(
        recipe, folder, machine, vocab_size=vocab_size, num_processes=num_processes,
        timed=timed, peak_flops=peak_flops, mfu=mfu,
    )  # fmt: skip
    if as_json:
        typer.echo(json.dumps(plan.to_dict(), indent=2))
    else:
        Console(width=110 if not Console().is_terminal else None).print(render_plan(plan, recipe))
    if plan.problems:
        raise UserError("; ".join(plan.problems))


def render_plan(plan: Plan, recipe: Recipe) -> Group:
    """The tables."""
    return Group(
        *_parameters(plan), *_memory(plan, recipe), *_work(plan, recipe), *_disk(plan, recipe), *_notes(plan, recipe)
    )


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index == 1 else "left", overflow="fold")
    return table


def _title(text: str) -> Text:
    return Text(text, style="bold")


def _parameters(plan: Plan) -> tuple[Text, Table]:
    table = _table("part", "parameters", "")
    for name, count in plan.parameters.items():
        if count:
            table.add_row(name, f"{count:,}", f"{count / plan.num_parameters:.1%}")
    table.add_section()
    table.add_row("all", f"{plan.num_parameters:,}", "")
    return _title("Parameters"), table


def _memory(plan: Plan, recipe: Recipe) -> tuple[Text, Table]:
    memory, training = plan.memory, recipe.training
    shared = training.sharding == "full" and plan.num_processes > 1
    part = f", 1/{plan.num_processes} of all" if shared else ""
    exchange = "blocks and embeddings made whole for a moment" if shared else "gradients in buckets, to be reduced"
    every = training.gradient_checkpointing
    checkpointed = "" if every is False else f", {'every block' if every is True else f'1 block in {every}'} recomputed"
    table = _table("part", "memory", "")
    rows = (
        ("weights", memory.weights, f"float32{part}"),
        ("gradients", memory.gradients, f"float32{part}"),
        ("optimizer states", memory.optimizer_state, recipe.optimizer.name + part),
        ("average of the weights", memory.ema, f"float32{part}"),
        ("exchange between processes", memory.exchange, exchange),
        (
            "activations",
            memory.activations,
            f"{training.per_device_batch_size} rows of {training.sequence_length} tokens{checkpointed}",
        ),
        ("backward pass", memory.backward, "chunks of logits, gradients of activations"),
        ("update", memory.update, "the optimizers' own work, when activations are gone"),
        ("allocator and kernels", memory.slack, "a twentieth and 64 MiB"),
    )
    for name, size, note in rows:
        if size:
            table.add_row(name, gibibytes(size), note)
    table.add_section()
    while_ = "in the backward pass" if memory.backward_peak >= memory.update_peak else "in the update"
    table.add_row("at most", gibibytes(memory.peak), f"{while_}; not every part is there at the same time")
    if plan.machine.on_cpu:
        if plan.num_processes > 1:
            table.add_row("", gibibytes(memory.peak * plan.num_processes), f"in {plan.num_processes} processes")
        table.add_row("checkpoint being written", gibibytes(memory.snapshot), "a copy, in the main process")
        table.add_row("all", gibibytes(plan.memory_asked), "")
    table.add_row("free", gibibytes(plan.machine.memory_bytes), plan.machine.name)
    precision = "bfloat16 products" if plan.machine.bfloat16 else "float32"
    return _title(f"Memory of a {'process' if plan.machine.on_cpu else 'device'}, {precision}"), table


def _work(plan: Plan, recipe: Recipe) -> tuple[Text, Table]:
    table = _table("what", "how much", "")
    table.add_row("FLOPs a token", _count(plan.flops_per_token), "forward and backward, causal scores, the head")
    table.add_row("FLOPs a step", _count(plan.flops_per_step), f"{plan.tokens_per_step:,} tokens")
    table.add_row("FLOPs of the run", _count(plan.flops_per_run), f"{recipe.training.num_steps:,} steps")
    table.add_row(
        "tokens of the run", _count(plan.num_tokens), f"{plan.num_tokens / plan.num_parameters:.3g} a parameter"
    )
    table.add_row(
        "compute-optimal",
        _count(plan.optimal_tokens),
        f"about {TOKENS_PER_PARAMETER} a parameter (arXiv:2203.15556); the run has "
        f"{plan.num_tokens / plan.optimal_tokens:.2f} x that",
    )
    if plan.corpus.num_tokens is None:
        table.add_row("tokens of the text", "unknown", f"{plan.corpus.how}; the run wants {plan.num_tokens:,}")
    else:
        table.add_row("tokens of the text", _count(plan.corpus.num_tokens), plan.corpus.how)
        table.add_row("epochs", _times(plan.epochs or 0), "")
    if plan.duration is not None:
        table.add_row("time of a step", _time(plan.duration.step_s), plan.duration.how)
        table.add_row("time of the run", _time(plan.duration.run_s), f"{plan.duration.tokens_per_second:,.0f} tokens/s")
    return _title("Work"), table


def _disk(plan: Plan, recipe: Recipe) -> tuple[Text, Table]:
    disk, training = plan.disk, recipe.training
    table = _table("part", "disk", "")
    if disk.shards:
        of = "the text" if plan.corpus.num_tokens is not None else "one epoch at most"
        if recipe.data.stream:
            of = f"the stream's sample of {recipe.data.stream_sample_mb:g} MB"
        table.add_row("tokens", gibibytes(disk.shards), of)
    kept = f"keep_last {training.keep_last}" + (f", keep_every {training.keep_every}" if training.keep_every else "")
    table.add_row(
        "checkpoints",
        gibibytes(disk.checkpoint * disk.num_checkpoints),
        f"{disk.num_checkpoints} of {gibibytes(disk.checkpoint)}: {kept}, and one being written",
    )
    table.add_row("the finished model", gibibytes(disk.model), "")
    table.add_section()
    table.add_row("all", gibibytes(disk.total), "")
    if plan.machine.disk_bytes is not None:
        table.add_row("free", gibibytes(plan.machine.disk_bytes), "")
    return _title("Disk"), table


def _notes(plan: Plan, recipe: Recipe) -> list[Text]:
    notes = []
    if plan.epochs is not None and plan.epochs > MAX_USEFUL_EPOCHS:
        notes.append(
            f"The text is read {_times(plan.epochs)} times; beyond about {MAX_USEFUL_EPOCHS} repetition teaches less "
            "and less (arXiv:2305.16264): give more text, or fewer steps."
        )
    if plan.duration is None and not plan.problems:
        notes.append("No time: give --peak-flops (and --mfu) of the device, or leave --no-timing out.")
    if plan.duration is not None and plan.duration.unevenness:
        notes.append(
            f"The time is rough: {plan.duration.unevenness}, so the machine is busy or changes its speed. Plan again "
            "when it is idle."
        )
    if recipe.training.compile:
        notes.append(
            "Compiled, the model keeps and recomputes other activations than those counted here, as a rule fewer."
        )
    return [Text(note) for note in notes]


def _times(epochs: float) -> str:
    """How often, in digits that mean something."""
    return f"{epochs:,.2f}" if epochs < 100 else f"{epochs:,.0f}"


def _count(number: int) -> str:
    value, unit = float(number), ""
    for larger in ("k", "M", "G", "T", "P", "E", "Z", "Y"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:,.2f} {unit}" if unit else str(number)


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:,.3g} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:,.1f} min"
    return f"{seconds / 3600:,.1f} h" if seconds < 96 * 3600 else f"{seconds / 86400:,.1f} days"

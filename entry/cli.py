"""The `tercet` command. torch is imported inside the commands: `tercet --help` answers at once."""

import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

import tercet
from tercet.command_line import (
    CheckpointOrName,
    Device,
    Output,
    Overrides,
    RecipeArgument,
    Restart,
    one_line,
    one_prompt,
)
from tercet.data_cli import data_app, tokenizer_app
from tercet.explore_cli import explore
from tercet.hub_cli import card, push
from tercet.recipe_cli import recipe
from tercet.training.errors import UserError

app = typer.Typer(
    name="tercet",
    help="Pretrain decoder-only language models from raw text, native to Hugging Face transformers.\n\n"
    "Begin with `tercet demo`: in about two minutes, with no network, it trains a tokenizer and a model "
    "and leaves a folder that AutoModelForCausalLM loads.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.add_typer(tokenizer_app, name="tokenizer")
app.add_typer(data_app, name="data")


CacheKind = Annotated[
    str | None,
    typer.Option(
        "--cache",
        metavar="full|int8|int4",
        help="How keys and values are held: full (default) as the model computes them; int8 in about a quarter of "
        "float32's bytes, text nearly always the same; int4 in about a seventh, text may differ a little. int8 and "
        "int4 need a Tercet checkpoint.",
    ),
]
Compile = Annotated[
    bool,
    typer.Option(
        "--compile",
        help="Compile the step that makes a token (Tercet checkpoints, full cache): the first token takes about half "
        "a minute, those after it less than before.",
    ),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tercet {tercet.__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command()
@one_line
def demo(
    output: Output = None,
    steps: Annotated[int | None, typer.Option(help="Train for this many steps instead of the recipe's.")] = None,
    restart: Restart = False,
) -> None:
    """Train a small model on Python's own documentation: no network, about two minutes on two cores."""
    from tercet.commands import run_demo

    run_demo(output, steps, restart)


app.command()(recipe)


@app.command()
@one_line
def train(
    recipe: RecipeArgument,
    settings: Overrides = None,
    output: Output = None,
    restart: Restart = False,
    max_hours: Annotated[
        float | None,
        typer.Option(min=0.0, help="Save and end before so many hours are over: a queue's limit, less what it needs."),
    ] = None,
) -> None:
    """Train what a recipe describes; started again, the same command goes on where it was stopped."""
    from tercet.commands import run_train

    limit = [] if max_hours is None else [f"training.max_hours={max_hours}"]
    run_train(recipe, [*(settings or []), *limit], output, restart)


@app.command()
@one_line
def plan(
    recipe: RecipeArgument,
    settings: Overrides = None,
    output: Output = None,
    processes: Annotated[int, typer.Option(min=1, help="Processes, one a device, that share the work.")] = 1,
    device_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Plan for accelerators with so much memory each, such as 80GB, not for here."
        ),
    ] = None,
    peak_flops: Annotated[
        float | None,
        typer.Option(min=1.0, help="FLOP/s of a device, such as 989e12: the time is estimated by it instead of timed."),
    ] = None,
    mfu: Annotated[
        float | None,
        typer.Option(min=0.01, max=1.0, help="Part of --peak-flops that training reaches; 0.4 if not given."),
    ] = None,
    timing: Annotated[
        bool, typer.Option("--timing/--no-timing", help="Run a few steps on random tokens to see how long they take.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print all figures as JSON.")] = False,
) -> None:
    """What a recipe will cost: parameters, memory by part, FLOPs, tokens, time, disk.

    What cannot fit is refused with what would, and exit code 2.
    """
    from tercet.plan_commands import run_plan

    run_plan(
        recipe, settings or [], output, num_processes=processes, device_memory=device_memory, peak_flops=peak_flops,
        mfu=mfu, timed=timing, as_json=as_json,
    )  # fmt: skip


@app.command("eval")
@one_line
def evaluate(
    checkpoint: CheckpointOrName,
    data: Annotated[
        str | None, typer.Option(help="Text to score instead of what the run held out: file, folder, glob, Hub name.")
    ] = None,
    context: Annotated[
        int | None, typer.Option(min=2, help="Tokens in a window; default: the model's longest, at most 1024.")
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(metavar="NAME,...", help="Tasks of lm-eval to run instead, such as arc_easy,lambada_openai."),
    ] = None,
    task_path: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder with tasks of your own, as lm-eval's YAML files.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only so many documents of each task.")] = None,
    num_fewshot: Annotated[int | None, typer.Option(min=0, help="Examples before each question.")] = None,
    device: Device = None,
) -> None:
    """Loss, perplexity and bits per byte, comparable across tokenizers, by source; or tasks of lm-eval."""
    if tasks is None and (task_path, limit, num_fewshot) != (None, None, None):
        raise UserError("--task-path, --limit and --num-fewshot belong to --tasks: say which tasks to run")
    if tasks is not None and (data, context) != (None, None):
        raise UserError("--data and --context score text, and --tasks runs tasks: give one or the other")
    from tercet.eval_commands import run_eval, run_tasks

    if tasks is None:
        run_eval(checkpoint, data, context, device)
    else:
        run_tasks(checkpoint, tasks, task_path=task_path, limit=limit, num_fewshot=num_fewshot, device=device)


@app.command()
@one_line
def generate(
    checkpoint: CheckpointOrName,
    text: Annotated[
        str | None, typer.Argument(help="Text to continue; a document's start if not given.", metavar="PROMPT")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="The same as an option.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens that may follow.")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token each time.")] = 0.7,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Draw among the likeliest that have this probability.")
    ] = 0.95,
    top_k: Annotated[int | None, typer.Option(min=1, help="Draw among so many of the likeliest tokens.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text.")] = None,
    num_samples: Annotated[
        int, typer.Option(min=1, help="Continuations to draw, side by side; the prompt is read once for all.")
    ] = 1,
    device: Device = None,
    cache: CacheKind = None,
    compile_step: Compile = False,
    prompt_cache: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Keep the prompt's keys and values in FILE and read them from there next time: only tokens behind the "
            "beginning that both prompts share are computed. FILE is written if it is not there, extended if the new "
            "prompt begins with the whole of its own, and left alone otherwise. Its kind of cache (--cache) stays.",
        ),
    ] = None,
) -> None:
    """Continue a text, token by token."""
    from tercet.generation import CacheOptions, Request, Sampling, run_generate

    if top_k is not None and temperature == 0:
        raise UserError("--top-k chooses what tokens are drawn from: give a --temperature above 0, too")
    if num_samples > 1 and temperature == 0:
        raise UserError("--num-samples would be the same text each time: give a --temperature above 0, too")
    if num_samples > 1 and compile_step:
        raise UserError("--compile is for one text, and --num-samples asks for several: leave one of both out")
    request = Request(one_prompt(text, prompt) or "", seed, num_samples, device)
    sampling = Sampling(max_new_tokens, temperature, top_p, top_k)
    run_generate(checkpoint, request, sampling, CacheOptions(cache, compile_step, prompt_cache))


@app.command()
@one_line
def chat(
    checkpoint: CheckpointOrName,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens that an answer may have.")] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token each time.")] = 0.7,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Draw among the likeliest that have this probability.")
    ] = 0.95,
    device: Device = None,
    cache: CacheKind = None,
    compile_step: Compile = False,
) -> None:
    """Talk to a checkpoint through its chat template.

    /reset forgets the conversation, /system TEXT begins a new one with a system message, /quit leaves. What was read
    stays in the cache: a turn computes only what is new.
    """
    from tercet.chat import run_chat
    from tercet.generation import CacheOptions, Sampling

    sampling = Sampling(max_new_tokens, temperature, top_p)
    run_chat(checkpoint, system, sampling, CacheOptions(cache, compile_step), device)


app.command()(explore)
app.command()(card)
app.command()(push)


@app.command("import")
@one_line
def import_native(
    source: Annotated[
        Path,
        typer.Argument(
            help="A GPT-2, Llama, Mistral, Qwen2, Qwen3 or SmolLM3 folder, its name on the Hub, or a GGUF.",
            metavar="SRC",
        ),
    ],
    destination: Annotated[Path, typer.Argument(help="Folder to write.", metavar="DST")],
) -> None:
    """Turn a checkpoint of a native family into a Tercet checkpoint with equal logits."""
    from tercet.interop_commands import run_import

    run_import(source, destination)


@app.command()
@one_line
def export(
    checkpoint: CheckpointOrName,
    destination: Annotated[Path, typer.Argument(help="Folder to write; for gguf a file.", metavar="DST")],
    to: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            help="llama, mistral, qwen2, qwen3, smollm3, gpt2, gguf or onnx; default: the narrowest native family.",
        ),
    ] = None,
    gguf_type: Annotated[
        str | None, typer.Option("--type", metavar="TYPE", help="For gguf: f32, f16 (default) or q8_0.")
    ] = None,
) -> None:
    """Write a checkpoint for other runtimes: a native family, which needs no custom code, GGUF or ONNX."""
    from tercet.interop_commands import run_export

    run_export(checkpoint, destination, to, gguf_type)


@app.command()
@one_line
def info(checkpoint: CheckpointOrName) -> None:
    """What a checkpoint is made of: weights, hyperparameters, memory, FLOPs and cache bytes per token."""
    from rich.console import Console

    from tercet.hub_checkpoints import local_checkpoint
    from tercet.info import render

    Console().print(render(local_checkpoint(checkpoint, with_weights=False)))


def run_command(name: str) -> None:
    """Run one command with this process's arguments: what `python -m tercet.<folder>` does."""
    sys.argv[1:1] = [name]
    main()


def main() -> None:
    """Entry point of `tercet`."""
    # Says on every import that a kernel for 4-bit weights, which Tercet does not use, is not installed.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    # Progress bars and warnings of libraries about what Tercet does on purpose would bury its own few lines.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_DISABLE_PROGRESS_BARS", "1")
    app()

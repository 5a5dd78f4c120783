"""The `tercet` command. torch is imported inside the commands: `tercet --help` answers at once.

A mistake of the user's is one line on standard error and exit code 2; anything else is a bug and shows its traceback.
"""

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NoReturn

import typer

import tercet
from tercet.training.atomic import is_disk_full
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
tokenizer_app = typer.Typer(help="Train a tokenizer on your own text.", no_args_is_help=True)
data_app = typer.Typer(help="Turn text into memory-mapped tokens.", no_args_is_help=True)
app.add_typer(tokenizer_app, name="tokenizer")
app.add_typer(data_app, name="data")


def _one_line(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose user errors are one line and exit code 2.

    Inside the command, because typer itself ends with 130 and no word on Ctrl-C.
    """

    @functools.wraps(command)
    def wrapped(*arguments: object, **keywords: object) -> None:
        try:
            command(*arguments, **keywords)
        except UserError as error:
            _fail(str(error))
        except KeyboardInterrupt:
            _fail("stopped; what was finished is kept, and the same command goes on with it")
        except BrokenPipeError:  # the reader of our output has gone, as `| head` does
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except Exception as error:
            if not is_disk_full(error):
                raise
            _fail("the disk is full: free some space and run the same command again; what was finished is kept")

    return wrapped


def _fail(message: str) -> NoReturn:
    if os.environ.get("TERCET_DEBUG"):
        raise
    typer.echo(f"tercet: {' '.join(message.split())}", err=True)
    raise typer.Exit(2)


Checkpoint = Annotated[Path, typer.Argument(help="A folder that from_pretrained loads.", metavar="CKPT")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a recipe's value; repeatable.")
]
RecipeArgument = Annotated[
    str, typer.Argument(help="A YAML file, or the name of a recipe that comes with Tercet.", metavar="RECIPE")
]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Folder to write, instead of the recipe's.")]
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
Restart = Annotated[bool, typer.Option("--restart", help="Remove an earlier run from the folder and begin anew.")]


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
@_one_line
def demo(
    output: Output = None,
    steps: Annotated[int | None, typer.Option(help="Train for this many steps instead of the recipe's.")] = None,
    restart: Restart = False,
) -> None:
    """Train a small model on Python's own documentation: no network, about two minutes on two cores."""
    from tercet.commands import run_demo

    run_demo(output, steps, restart)


@app.command()
@_one_line
def train(recipe: RecipeArgument, settings: Overrides = None, output: Output = None, restart: Restart = False) -> None:
    """Train what a recipe describes; started again, the same command goes on where it was stopped."""
    from tercet.commands import run_train

    run_train(recipe, settings or [], output, restart)


@tokenizer_app.command("train")
@_one_line
def tokenizer_train(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write.")],
    paths: Annotated[
        list[str] | None, typer.Argument(help="Files, folders, globs or Hub datasets.", metavar="DATA...")
    ] = None,
    data: Annotated[
        list[str] | None, typer.Option("--data", metavar="DATA", help="The same as an option; repeatable.")
    ] = None,
    vocab_size: Annotated[int, typer.Option(help="Tokens in the vocabulary, special ones included.")] = 8192,
    text_column: Annotated[str, typer.Option(help="Column that holds the text, wherever rows have columns.")] = "text",
    source_column: Annotated[
        str | None, typer.Option(help="Column that names the source of a row; the report groups by it, or by DATA.")
    ] = None,
    max_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Text to learn from, sampled by hash; 256MB if not given.")
    ] = None,
    max_documents: Annotated[
        int | None, typer.Option(min=1, help="Documents to learn from, sampled by hash; two million if not given.")
    ] = None,
    report: Annotated[
        bool,
        typer.Option("--report", help="Show bytes per token by source, unused and longest tokens; keep it as JSON."),
    ] = False,
    compare: Annotated[
        list[str] | None,
        typer.Option(metavar="FOLDER", help="Another tokenizer to measure on the same text; repeatable."),
    ] = None,
) -> None:
    """Train a byte-level BPE tokenizer that AutoTokenizer loads.

    Memory stays below 1 GB however large the corpus. One document in twenty, the same that a recipe holds out, is not
    learned from: bytes per token are measured on it.
    """
    from tercet.tokenizer_commands import TokenizerRequest, run_tokenizer_train

    run_tokenizer_train(
        TokenizerRequest(
            [*(paths or []), *(data or [])], output, vocab_size, text_column, source_column, max_bytes, max_documents,
            with_report=report or bool(compare), compare=tuple(compare or ()),
        )
    )  # fmt: skip


@data_app.command("prepare")
@_one_line
def data_prepare(
    recipe: RecipeArgument,
    settings: Overrides = None,
    output: Output = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes that tokenize; default: the cores. The result is the same.")
    ] = None,
    shard: Annotated[
        str | None,
        typer.Option(
            metavar="i/n",
            help="Prepare part i of n, i from 0, on this machine; `tercet data merge` joins the parts. Without "
            "--output into the recipe's folder with -i-of-n behind its name.",
        ),
    ] = None,
) -> None:
    """Train a recipe's tokenizer and tokenize its text, ready for `tercet train`.

    Stopped at any point, the same command goes on with what was finished.
    """
    from tercet.data_commands import run_data_prepare

    run_data_prepare(recipe, settings or [], output, workers, shard)


@data_app.command("merge")
@_one_line
def data_merge(
    parts: Annotated[list[Path], typer.Argument(help="Folders that `prepare --shard` wrote.", metavar="PART...")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write, ready for `tercet train`.")],
) -> None:
    """Join all parts of a corpus, prepared with --shard 0/n to n-1/n, into one set."""
    from tercet.data_commands import run_data_merge

    run_data_merge(parts, output)


@data_app.command("info")
@_one_line
def data_info(
    folder: Annotated[Path, typer.Argument(help="A run's folder, or its data/.", metavar="DIR")],
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Also draw it.")] = None,
    row: Annotated[int, typer.Option(min=0, help="The packed row to show.")] = 0,
    sequence_length: Annotated[
        int | None, typer.Option(min=2, help="Tokens in a row; default: the recipe's, or 1024.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Decodes the row; default: the one in the run's folder.")
    ] = None,
) -> None:
    """What a prepared set holds: sources, lengths, what was left out, how rows fill, a row with its documents."""
    from tercet.data_commands import run_data_info

    run_data_info(folder, tokenizer, sequence_length, row, plot)


@app.command("eval")
@_one_line
def evaluate(
    checkpoint: Checkpoint,
    data: Annotated[
        str | None, typer.Option(help="Text to score instead of what the run held out: file, folder, glob, Hub name.")
    ] = None,
    context: Annotated[
        int | None, typer.Option(min=2, help="Tokens in a window; default: the model's longest, at most 1024.")
    ] = None,
) -> None:
    """Loss, perplexity and bits per byte, comparable across tokenizers."""
    from tercet.commands import run_eval

    run_eval(checkpoint, data, context)


@app.command()
@_one_line
def generate(
    checkpoint: Checkpoint,
    prompt: Annotated[str, typer.Argument(help="Text to continue.")] = "",
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token each time.")] = 0.7,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 0.95,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text.")] = None,
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
    from tercet.generation import CacheOptions, Sampling, run_generate

    sampling = Sampling(max_new_tokens, temperature, top_p)
    run_generate(checkpoint, prompt, sampling, seed, CacheOptions(cache, compile_step, prompt_cache))


@app.command()
@_one_line
def chat(
    checkpoint: Checkpoint,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 200,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.7,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 0.95,
    cache: CacheKind = None,
    compile_step: Compile = False,
) -> None:
    """Talk to a checkpoint through its chat template.

    /reset forgets the conversation, /system TEXT begins a new one with a system message, /quit leaves. What was read
    stays in the cache: a turn computes only what is new.
    """
    from tercet.chat import run_chat
    from tercet.generation import CacheOptions, Sampling

    run_chat(checkpoint, system, Sampling(max_new_tokens, temperature, top_p), CacheOptions(cache, compile_step))


@app.command()
@_one_line
def card(
    checkpoint: Checkpoint,
    repo_id: Annotated[str | None, typer.Option(help="Hub repository that readers will load from.")] = None,
    license: Annotated[str | None, typer.Option(help="Licence of the weights, such as apache-2.0.")] = None,
) -> None:
    """Write the model card, filled with what the run measured."""
    from tercet.hub import write_card

    typer.echo(f"wrote {write_card(checkpoint, repo_id=repo_id, license=license)}")


@app.command("import")
@_one_line
def import_native(
    source: Annotated[
        Path, typer.Argument(help="A GPT-2, Llama, Mistral, Qwen2, Qwen3 or SmolLM3 folder, or GGUF.", metavar="SRC")
    ],
    destination: Annotated[Path, typer.Argument(help="Folder to write.", metavar="DST")],
) -> None:
    """Turn a checkpoint of a native family into a Tercet checkpoint with equal logits."""
    from tercet.interop_commands import run_import

    run_import(source, destination)


@app.command()
@_one_line
def export(
    checkpoint: Checkpoint,
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
@_one_line
def info(checkpoint: Checkpoint) -> None:
    """What a checkpoint is made of: weights, hyperparameters, memory, FLOPs and cache bytes per token."""
    from rich.console import Console

    from tercet.info import render

    Console().print(render(checkpoint))


def run_command(name: str) -> None:
    """Run one command with this process's arguments: what `python -m tercet.<folder>` does."""
    sys.argv[1:1] = [name]
    main()


def main() -> None:
    """Entry point of `tercet`."""
    # Progress bars and warnings of libraries about what Tercet does on purpose would bury its own few lines.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_DISABLE_PROGRESS_BARS", "1")
    app()

"""`tercet tokenizer ...` and `tercet data ...`; torch is imported inside the commands: `tercet --help` must not."""

from pathlib import Path
from typing import Annotated

import typer

from tercet.command_line import Output, Overrides, RecipeArgument, one_line

tokenizer_app = typer.Typer(help="Train a tokenizer on your own text.", no_args_is_help=True)
data_app = typer.Typer(help="Turn text into memory-mapped tokens.", no_args_is_help=True)


@tokenizer_app.command("train")
@one_line
def tokenizer_train(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write.")],
    paths: Annotated[
        list[str] | None, typer.Argument(help="Files, folders, globs or Hub datasets.", metavar="DATA...")
    ] = None,
    data: Annotated[
        list[str] | None, typer.Option("--data", metavar="DATA", help="The same as an option; repeatable.")
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe",
            metavar="RECIPE",
            help="The text, the vocabulary's size, the words and what is held out are a recipe's, instead of DATA: "
            "sources with their columns and templates, conversations, configurations of Hub datasets.",
        ),
    ] = None,
    settings: Overrides = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(help="Tokens in the vocabulary, special ones included.", show_default="8192, or the recipe's"),
    ] = None,
    words: Annotated[
        str | None,
        typer.Option(
            metavar="llama3|bloom|clauses|blanks",
            help="What BPE merges inside: Llama 3's words, or longer ones, which make fewer tokens: BLOOM's; clauses, "
            "what is between blanks, but numbers and the comma behind a word apart; or whatever is between blanks, "
            "which llama.cpp does not run.",
            show_default="llama3, or the recipe's",
        ),
    ] = None,
    text_column: Annotated[
        str | None,
        typer.Option(help="Column that holds the text, wherever rows have columns.", show_default="text"),
    ] = None,
    source_column: Annotated[
        str | None, typer.Option(help="Column that names the source of a row; the report groups by it, or by DATA.")
    ] = None,
    on_bad_row: Annotated[
        str | None,
        typer.Option(
            metavar="error|skip",
            help="Whether a row that cannot be used ends the reading, or is left out and counted.",
            show_default="error",
        ),
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
            [*(paths or []), *(data or [])], output, vocab_size, words, recipe, tuple(settings or ()), text_column,
            source_column, on_bad_row, max_bytes, max_documents,
            with_report=report or bool(compare), compare=tuple(compare or ()),
        )
    )  # fmt: skip


@data_app.command("prepare")
@one_line
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

    Training then takes the same recipe, the same --set and the folder written here as its --output.

    Stopped at any point, the same command goes on with what was finished.
    """
    from tercet.data_commands import run_data_prepare

    run_data_prepare(recipe, settings or [], output, workers, shard)


@data_app.command("merge")
@one_line
def data_merge(
    parts: Annotated[list[Path], typer.Argument(help="Folders that `prepare --shard` wrote.", metavar="PART...")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write, ready for `tercet train`.")],
) -> None:
    """Join all parts of a corpus, prepared with --shard 0/n to n-1/n, into one set."""
    from tercet.data_commands import run_data_merge

    run_data_merge(parts, output)


@data_app.command("info")
@one_line
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

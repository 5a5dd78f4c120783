"""`tercet tokenizer train`, once transformers may be imported."""

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

from tercet.tokenizer import (
    ReportText,
    SampleCounts,
    TokenizerReport,
    VocabularyTooLargeError,
    make_report,
    train_tokenizer,
)
from tercet.tokenizer.pretokenization import Words, word_splitter
from tercet.tokenizer.reading import as_value_error
from tercet.tokenizer.report import REPORT_NAME, SourceFigures, readable
from tercet.tokenizer.sampling import MIN_SAMPLE_BYTES
from tercet.tokenizer.training import MAX_BYTES, MAX_DOCUMENTS
from tercet.tokenizer_text import PathTexts, RecipeTexts, TrainingTexts
from tercet.training.atomic import place_files, temporary_folder
from tercet.training.counts import megabytes
from tercet.training.errors import UserError, as_user_error

logging.disable_progress_bar()

DEFAULT_VOCAB_SIZE = 8192

_SIZE = re.compile(r"([0-9][0-9_,]*(?:\.[0-9]+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)
_TABLE_WIDTH = 110


@dataclass(frozen=True)
class TokenizerRequest:
    """What the command line asks for.

    Attributes:
        data: Files, folders, globs or Hub datasets; none with a recipe.
        vocab_size: None is the recipe's, or 8,192.
        words: What BPE merges inside; None is the recipe's, or Llama 3's.
        recipe: A YAML file or a name; its sources, and what it holds out, instead of `data` and the columns.
        settings: Overrides of the recipe's keys.
        text_column: See `PathTexts`, as for `source_column` and `on_bad_row`.
        max_bytes: As the user writes it ("256MB"); None is the default.
        compare: Folders, or names on the Hub, of tokenizers to measure beside this one.
    """

    data: list[str]
    output: Path
    vocab_size: int | None = None
    words: str | None = None
    recipe: str | None = None
    settings: tuple[str, ...] = ()
    text_column: str | None = None
    source_column: str | None = None
    on_bad_row: str | None = None
    max_bytes: str | None = None
    max_documents: int | None = None
    with_report: bool = False
    compare: tuple[str, ...] = ()


def run_tokenizer_train(request: TokenizerRequest) -> None:
    """`tercet tokenizer train`."""
    output = request.output
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output} exists and is not an empty folder: choose another output folder")
    max_bytes = MAX_BYTES if request.max_bytes is None else parse_size(request.max_bytes, "--max-bytes")
    if max_bytes < MIN_SAMPLE_BYTES:
        raise UserError(f"--max-bytes {request.max_bytes} is too small a sample: give at least {MIN_SAMPLE_BYTES}")
    texts, vocab_size, words = _what_to_learn(request)
    with as_user_error("--words"):
        word_splitter(words)
    compared = _names(request.compare, output.name)
    for path in compared.values():  # a mistake shows now; they are not kept beside the training's memory
        _load_other(path)
    counts: list[SampleCounts] = []
    with ReportText() as text:
        try:
            with as_user_error("--vocab-size"):
                tokenizer = train_tokenizer(
                    texts.learned(text.add), vocab_size, words=words, max_bytes=max_bytes,
                    max_documents=request.max_documents or MAX_DOCUMENTS,
                    show_progress=sys.stderr.isatty(), on_text_used=counts.append,
                )  # fmt: skip
        except UserError as error:
            if isinstance(error.__cause__, VocabularyTooLargeError):
                raise UserError(f"{error}: --vocab-size {error.__cause__.largest}") from error
            raise
        if not len(text):  # no document fell to the held-out part: there are few
            texts.held_out = False
            for document in texts.documents():
                text.add(document.text, document.source)
        others = {name: _load_other(path) for name, path in compared.items()}
        report = make_report({output.name: tokenizer, **others}, text, held_out=texts.held_out)
    _save(tokenizer, report if request.with_report else None, output)
    for line in texts.skips.lines():
        typer.echo(line)
    _say_result(request, report, counts[0])
    if request.with_report:
        print_report(report)


def _what_to_learn(request: TokenizerRequest) -> tuple[TrainingTexts, int, Words]:
    """The texts, the size of the vocabulary, and the words."""
    if request.recipe is None:
        if request.settings:
            raise UserError(f"--set {request.settings[0]} overrides a recipe: name one with --recipe")
        vocab_size, words = DEFAULT_VOCAB_SIZE, "llama3"
        texts = PathTexts(request.data, request.text_column, request.source_column, request.on_bad_row)
    else:
        from tercet.training.recipe import load_recipe  # and torch, which so stays out where there is no recipe

        _check_only_recipe(request)
        recipe = load_recipe(request.recipe, request.settings)
        vocab_size, words = recipe.tokenizer.vocab_size, recipe.tokenizer.words
        texts = RecipeTexts(recipe)
    if request.vocab_size is not None:
        vocab_size = request.vocab_size
    return texts, vocab_size, cast(Words, words if request.words is None else request.words)


def _check_only_recipe(request: TokenizerRequest) -> None:
    own = {
        "DATA": request.data,
        "--text-column": request.text_column,
        "--source-column": request.source_column,
        "--on-bad-row": request.on_bad_row,
    }
    for name, value in own.items():
        if value:
            raise UserError(f"{name} and --recipe: the text is the recipe's; set its keys under data, or with --set")


def parse_size(text: str, option: str) -> int:
    """Bytes of "256MB" (a million each), "1.5GiB" or "4096".

    Raises:
        UserError: If it is none of these.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UserError(f"{option} {text!r} is no size: give bytes, or a number with kB, MB, GB, such as 256MB")
    number, unit, binary = match.groups()
    base = 1024 if binary else 1000
    return int(float(number.replace("_", "").replace(",", "")) * base ** " KMGT".index(unit.upper() or " "))


def _names(paths: tuple[str, ...], own: str) -> dict[str, str]:
    """Short names for the columns of the table: the folder's, or the whole path where two would be called the same."""
    short = [Path(path).name for path in paths]
    return {
        name if short.count(name) == 1 and name != own else path: path for name, path in zip(short, paths, strict=True)
    }


def _load_other(path: str) -> PreTrainedTokenizerFast:
    try:
        if (Path(path) / "tokenizer.json").is_file():
            with as_value_error():
                return PreTrainedTokenizerFast.from_pretrained(path)
        from transformers import AutoTokenizer  # imports torch, whose 200 MB would lie beside the training's

        with as_value_error():
            tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise UserError(f"--compare {path}: no tokenizer that AutoTokenizer loads ({reason[0]})") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UserError(f"--compare {path}: the tokenizer has no tokenizer.json, so it cannot be run on so much text")
    return tokenizer


def _save(tokenizer: PreTrainedTokenizerFast, report: TokenizerReport | None, output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    with temporary_folder(output) as temporary:
        tokenizer.save_pretrained(temporary)
        if report is not None:
            content = json.dumps(report.to_dict(), ensure_ascii=False, indent=1) + "\n"
            (Path(temporary) / REPORT_NAME).write_text(content, encoding="utf-8")
        place_files(Path(temporary), output, last="tokenizer.json")


def _say_result(request: TokenizerRequest, report: TokenizerReport, counts: SampleCounts) -> None:
    total = report.total
    where = "held-out text" if report.held_out else "the text that it was trained on"
    typer.echo(
        f"{request.output}: {report.tokenizers[report.name]:,} tokens, "
        f"{total.bytes_per_token(report.name):.2f} bytes per token on {megabytes(total.num_bytes)} of {where}"
    )
    if not counts.is_whole:
        typer.echo(
            f"Trained on a sample by hash: {counts.kept_bytes / 1e6:,.1f} of {counts.seen_bytes / 1e6:,.1f} MB, "
            f"{counts.kept_pieces:,} of {counts.seen_pieces:,} documents, a long one once for each piece of it"
        )


def print_report(report: TokenizerReport) -> None:
    """The table, and a line each for unused and for the longest tokens."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption_justify="left")
    table.add_column("Source")
    for heading in ("MB", "Bytes per token", "Tokens per word", *_headings(report)):
        table.add_column(heading, justify="right")
    for name, figures in report.sources.items():
        table.add_row(name, *_cells(report, figures))
    if len(report.sources) > 1:
        table.add_section()
        table.add_row("all of these", *_cells(report, report.total))
    console = Console(width=None if sys.stdout.isatty() else _TABLE_WIDTH)
    console.print(table)
    vocab_size, unused = report.tokenizers[report.name], len(report.unused_tokens)
    typer.echo(
        f"Unused     {unused:,} of {vocab_size:,} tokens ({unused / vocab_size:.1%}) came up nowhere in these "
        f"{megabytes(report.total.num_bytes)}"
    )
    typer.echo(f"Longest    {'  '.join(map(readable, report.longest_tokens))}")


def _headings(report: TokenizerReport) -> list[str]:
    return [f"{name} ({size:,})" for name, size in list(report.tokenizers.items())[1:]]


def _cells(report: TokenizerReport, figures: SourceFigures) -> list[str]:
    others = list(report.tokenizers)[1:]
    return [
        f"{figures.num_bytes / 1e6:.2f}",
        f"{figures.bytes_per_token(report.name):.3f}",
        f"{figures.fertility(report.name):.3f}",
        *(f"{figures.bytes_per_token(name):.3f}" for name in others),
    ]

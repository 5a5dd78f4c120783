"""What the `data` commands do: prepare a corpus, join its parts, show what a prepared set holds."""

import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from transformers import PreTrainedTokenizerFast

from tercet.program import program
from tercet.training.atomic import place_files, temporary_folder
from tercet.training.counts import counted
from tercet.training.data_info import check_tokenizer, describe_data
from tercet.training.errors import UserError
from tercet.training.merge import merge
from tercet.training.preparation import load_tokenizer, make_data, make_tokenizer
from tercet.training.recipe import Recipe, load_recipe
from tercet.training.run_folder import (
    DATA_NAME,
    RECIPE_NAME,
    locked_run_folder,
    open_run_folder,
    remove_run,
)
from tercet.training.token_set import MANIFEST, PreparedData

_DEFAULT_ROW_TOKENS = 1024


def run_data_prepare(
    recipe_name: str, overrides: list[str], output: Path | None, workers: int | None, shard: str | None
) -> None:
    """`tercet data prepare`."""
    recipe = load_recipe(recipe_name, overrides)
    if recipe.data.stream:
        raise UserError(
            "data.stream: true is to train without preparing, and `tercet train` makes what it needs: to prepare the "
            "text, --set data.stream=false"
        )
    part = None if shard is None else parse_part(shard)
    name = recipe.output_dir if part is None else f"{recipe.output_dir}-{part[0]}-of-{part[1]}"
    folder = (output or Path(name)).expanduser()
    with _claimed(recipe, folder):
        tokenizer = make_tokenizer(recipe, folder, typer.echo)
        data = make_data(recipe, tokenizer, folder, typer.echo, progress=True, workers=workers, part=part)
    _print_sources(data)
    if part is None:
        settings = [word for setting in overrides for word in ("--set", setting)]
        command = shlex.join(["train", recipe_name, *settings, "--output", str(folder)])
        typer.echo(f"\nNext:\n  {program()} {command}")
    else:
        typer.echo(
            f"{folder}: part {part[0]} of {part[1]}; when all parts are there: tercet data merge PART... --output DIR"
        )


def parse_part(shard: str) -> tuple[int, int]:
    """(i, n) of "i/n".

    Raises:
        UserError: If it is not of this form, or i is not in 0 .. n - 1.
    """
    if (match := re.fullmatch(r"(\d+)/(\d+)", shard.strip())) is None:
        raise UserError(f"--shard {shard}: expected i/n, such as 0/4 for the first of four parts")
    number, num_parts = int(match[1]), int(match[2])
    if number >= num_parts:
        raise UserError(f"--shard {shard}: {num_parts} parts are numbered from 0 to {max(num_parts - 1, 0)}")
    return number, num_parts


def run_data_merge(parts: list[Path], output: Path) -> None:
    """`tercet data merge`."""
    folders = [_data_folder(part) for part in parts]
    if any(folder == part for folder, part in zip(folders, parts, strict=True)):
        data = merge(folders, output)  # sets alone, made through Python: no tokenizer or recipe lies beside them
    else:
        recipe = load_recipe(str(parts[0] / RECIPE_NAME))
        with _claimed(recipe, output):
            tokenizer = load_tokenizer(str(parts[0]))
            check_tokenizer(PreparedData.open(folders[0]), tokenizer, folders[0])
            _save_tokenizer(tokenizer, output)
            data = merge(folders, output / DATA_NAME)
    typer.echo(
        f"{output}: {len(parts)} parts, {data.report.documents:,} documents, {data.report.tokens:,} tokens "
        f"({data.validation.num_tokens:,} held out)"
    )
    _print_sources(data)


def run_data_info(
    folder: Path, tokenizer_path: Path | None, sequence_length: int | None, row: int, plot: Path | None
) -> None:
    """`tercet data info`."""
    if plot is not None:
        _check_picture_path(plot)
    data_dir = _data_folder(folder)
    home = data_dir.parent if data_dir.name == DATA_NAME else data_dir
    if tokenizer_path is None and (home / "tokenizer.json").is_file():
        tokenizer_path = home
    rows: dict[str, Any] = {"sequence_length": _DEFAULT_ROW_TOKENS}
    if (home / RECIPE_NAME).is_file():
        recipe = load_recipe(str(home / RECIPE_NAME))
        training = recipe.training
        if recipe.data.stream:
            typer.echo("A sample of the stream: for a tokenizer, and to hold out; training reads the stream itself.\n")
        rows = {
            "sequence_length": training.sequence_length,
            "packing": training.packing,
            "weights": recipe.data.weights(),
        }
    if sequence_length is not None:
        rows["sequence_length"] = sequence_length
    tokenizer = None if tokenizer_path is None else load_tokenizer(str(tokenizer_path))
    for line in describe_data(data_dir, tokenizer=tokenizer, row=row, **rows):
        typer.echo(line)
    if tokenizer is None:
        typer.echo("  (ids, as there is no tokenizer beside the set: give one with --tokenizer)")
    if plot is not None:
        from tercet.training.data_picture import plot_data

        plot_data(PreparedData.open(data_dir), plot, title=str(folder), sequence_length=rows["sequence_length"])
        typer.echo(f"\nwrote {plot}")


def _check_picture_path(plot: Path) -> None:
    if plot.suffix.lower() != ".png":
        raise UserError(f"--plot {plot}: the picture is a PNG; give a name that ends in .png")
    if not plot.parent.is_dir():
        raise UserError(f"--plot {plot}: the folder {plot.parent} does not exist")


def _data_folder(folder: Path) -> Path:
    """The set itself, in a run's folder or given as it is."""
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder: give a run's folder, or its {DATA_NAME}/")
    return folder if (folder / MANIFEST).is_file() or not (folder / DATA_NAME).is_dir() else folder / DATA_NAME


def _print_sources(data: PreparedData) -> None:
    for name, report in data.report.by_source.items():
        typer.echo(
            f"  {name}: {counted(report.documents, 'document')} kept, {report.tokens:,} tokens, "
            f"{report.bytes:,} bytes; {counted(report.duplicates_dropped, 'duplicate')} dropped"
        )


def _save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    with temporary_folder(folder) as temporary:
        tokenizer.save_pretrained(temporary)
        place_files(Path(temporary), folder, last="tokenizer.json")


@contextmanager
def _claimed(recipe: Recipe, folder: Path) -> Iterator[None]:
    """The folder is this recipe's inside. A failure before the first shard leaves nothing new in it, a later one what
    is finished: the same command goes on with it.
    """
    with locked_run_folder(folder):
        open_run_folder(recipe, folder)
        had_data = (folder / DATA_NAME).exists()
        try:
            yield
        except Exception:
            if not had_data and not any((folder / DATA_NAME).glob("shard-*.npz")):
                remove_run(folder)
            raise

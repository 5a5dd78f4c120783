"""`tercet recipe`: what recipes there are, one to copy, and every key that one may have."""

import shutil
from typing import Annotated

import typer

from tercet.command_line import one_line
from tercet.training.built_in_recipes import recipe_names, recipe_summary, recipe_text
from tercet.training.errors import UserError


@one_line
def recipe(
    name: Annotated[
        str | None, typer.Argument(help="A recipe to print; with --keys a section to show.", metavar="NAME")
    ] = None,
    keys: Annotated[
        bool, typer.Option("--keys", help="Every key of a recipe: what it takes, its default, what it is for.")
    ] = False,
) -> None:
    """List the recipes that come with Tercet, or print one: `tercet recipe demo > my.yaml` is a copy to change."""
    if keys:
        _show_keys(name)
    elif name is None:
        _list_recipes()
    elif name in recipe_names():
        typer.echo(recipe_text(name), nl=False)
    else:
        raise UserError(f"no recipe {name} comes with Tercet: choose one of {', '.join(recipe_names())}")


def _list_recipes() -> None:
    width = max(map(len, recipe_names()))
    for name in recipe_names():
        typer.echo(f"{name:<{width}}  {recipe_summary(name)}")
    typer.echo(
        "\ntercet recipe NAME > my.yaml    a copy to change, for `tercet train my.yaml`\n"
        "tercet recipe --keys            every key that it may have"
    )


def _show_keys(section: str | None) -> None:
    from tercet.training.recipe_reference import as_lines

    for line in as_lines([] if section is None else [section], width=min(shutil.get_terminal_size().columns, 120)):
        typer.echo(line)

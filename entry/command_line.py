"""What all commands share: their usual arguments, and how a mistake of the user's is told.

A mistake is one line on standard error and exit code 2; anything else is a bug and shows its traceback.
"""

import errno
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from tercet.training.atomic import is_disk_full
from tercet.training.built_in_recipes import recipe_names
from tercet.training.errors import UserError

Checkpoint = Annotated[Path, typer.Argument(help="A folder that from_pretrained loads.", metavar="CKPT")]
CheckpointOrName = Annotated[
    Path,
    typer.Argument(help="A folder that from_pretrained loads, or the name of a model on the Hub.", metavar="CKPT"),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a recipe's value, such as training.num_steps=100; repeatable."
    ),
]
RecipeArgument = Annotated[
    str,
    typer.Argument(
        help=f"A YAML file, or the name of a recipe that comes with Tercet: {', '.join(recipe_names())}. "
        "`tercet recipe` tells what they are, `tercet recipe --keys` every key of one.",
        metavar="RECIPE",
    ),
]
Device = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Where the model runs, such as cpu or cuda; a GPU that is here if not given."),
]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Folder to write, instead of the recipe's.")]
Restart = Annotated[bool, typer.Option("--restart", help="Remove an earlier run from the folder and begin anew.")]


def one_line(command: Callable[..., None]) -> Callable[..., None]:
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
            where = f" ({error.filename})" if isinstance(error, OSError) and error.filename else ""
            if isinstance(error, OSError) and error.errno == errno.EFBIG:
                _fail(
                    f"a file{where} became larger than this shell (ulimit -f) or the file system takes: raise the "
                    "limit and run the same command again; what was finished is kept"
                )
            if not is_disk_full(error):
                raise
            _fail(f"the disk is full{where}: free some space and run the same command again; what was finished is kept")

    return wrapped


def one_prompt(argument: str | None, option: str | None) -> str | None:
    """The prompt, whichever way it was given.

    Raises:
        UserError: If it was given both ways.
    """
    if argument is not None and option is not None:
        raise UserError("the prompt was given twice: give it behind the checkpoint, or as --prompt")
    return argument if option is None else option


def _fail(message: str) -> NoReturn:
    if os.environ.get("TERCET_DEBUG"):
        raise
    typer.echo(f"tercet: {' '.join(message.split())}", err=True)
    raise typer.Exit(2)

"""The dialogues of the package `chatterbot-corpus` as chat messages: `python -m tercet.recipes.chatterbot_corpus`.

    pip install chatterbot-corpus
    python -m tercet.recipes.chatterbot_corpus out/dialogues.jsonl

The package (BSD licence) holds dialogues in YAML, `conversations: [[question, answer, ...], ...]`; the file written has
one conversation a line, {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}, ...]}.
Nearly all dialogues are one question and its answer. A model that has seen nothing else is lost at a second question,
so two dialogues also follow one another.
"""

import json
import random
import sys
from collections.abc import Iterator
from importlib import util
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from tercet.training.atomic import write_atomically
from tercet.training.chat_messages import render_messages, tercet_chat_format
from tercet.training.errors import UserError
from tercet.training.split import is_validation

VALIDATION_FRACTION = 0.05
_PACKAGE = "chatterbot_corpus"


def conversations(folder: Path) -> Iterator[list[dict[str, str]]]:
    """Every conversation of a folder's `*.yml`, in the order of the files' names, as messages.

    A turn by the user opens it and the turns alternate; what follows the assistant's last turn is left out, and so is
    what has no answer.

    Raises:
        UserError: A file that is no such YAML, or a folder without one.
    """
    paths = sorted(folder.glob("*.yml"))
    if not paths:
        raise UserError(f"{folder} holds no *.yml: give a language of the corpus, such as english")
    for path in paths:
        try:
            found = [_messages(turns) for turns in yaml.safe_load(path.read_text("utf-8"))["conversations"]]
        except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError) as error:
            raise UserError(f"{path} holds no conversations: {' '.join(str(error).split())[:200]}") from error
        yield from (messages for messages in found if messages)


def arranged(
    dialogues: list[list[dict[str, str]]], validation_fraction: float = VALIDATION_FRACTION
) -> Iterator[list[dict[str, str]]]:
    """Every different dialogue in conversations of one and of two; the same each time.

    Dialogues go in pairs. A pair is one conversation; where a recipe does not hold that out, its two dialogues also
    stand alone and in the other order, as far as it does not hold that out: what is held out occurs nowhere else.

    Args:
        dialogues: As messages.
        validation_fraction: The recipe's, which splits conversations by their text in Tercet's own chat template.
    """
    different = list({json.dumps(messages): messages for messages in dialogues}.values())
    random.Random(0).shuffle(different)
    for first, second in zip_longest(different[::2], different[1::2], fillvalue=[]):
        pair = [*first, *second]
        yield pair
        if second and not _is_held_out(pair, validation_fraction):
            for other in ([*second, *first], first, second):
                if not _is_held_out(other, validation_fraction):
                    yield other


def _is_held_out(messages: list[dict[str, str]], validation_fraction: float) -> bool:
    text = "".join(segment.text for segment in render_messages(messages, tercet_chat_format()))
    return is_validation(text, validation_fraction)


def _messages(turns: list[Any]) -> list[dict[str, str]]:
    # YAML reads a bare `Yes` as true and `42` as a number; none of the dialogues means one.
    texts = [("Yes" if turn else "No") if isinstance(turn, bool) else str(turn).strip() for turn in turns if turn != ""]
    texts = texts[: len(texts) // 2 * 2]
    roles = ("user", "assistant")
    return [{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)]


def corpus_folder(language: str) -> Path:
    """Where the installed package has a language's dialogues.

    Raises:
        UserError: The package is not installed, or has no such language.
    """
    spec = util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise UserError("the dialogues come with the package chatterbot-corpus: pip install chatterbot-corpus")
    folder = Path(spec.submodule_search_locations[0], "data", language)
    if not folder.is_dir():
        known = ", ".join(sorted(path.name for path in folder.parent.iterdir() if path.is_dir()))
        raise UserError(f"chatterbot-corpus has no {language}: choose one of {known}")
    return folder


def main(
    destination: Annotated[Path, typer.Argument(metavar="OUT.jsonl")],
    language: str = "english",
    validation_fraction: Annotated[float, typer.Option(help="The recipe's.")] = VALIDATION_FRACTION,
) -> None:
    """Write the dialogues of chatterbot-corpus in one language as chat messages, JSON lines."""
    try:
        dialogues = list(conversations(corpus_folder(language)))
        lines = [
            json.dumps({"messages": messages}, ensure_ascii=False)
            for messages in arranged(dialogues, validation_fraction)
        ]
        destination.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(destination, "".join(line + "\n" for line in lines).encode())
    except (UserError, OSError) as error:
        typer.echo(f"tercet: {error}", err=True)
        sys.exit(2)
    typer.echo(f"{len(dialogues):,} dialogues, the different ones in {len(lines):,} conversations, in {destination}")


if __name__ == "__main__":
    typer.run(main)

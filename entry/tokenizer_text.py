"""The text of `tercet tokenizer train`: what is learned from, and what is held out for the report."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

from tercet.training.documents import Document
from tercet.training.errors import UserError
from tercet.training.skips import SkipReport
from tercet.training.sources import Source, read_documents
from tercet.training.split import is_validation

if TYPE_CHECKING:
    from tercet.training.recipe import Recipe  # brings torch and its 250 MB

HELD_OUT = 0.05
"""Part of the documents that is not trained on: those that a recipe holds out, where it says nothing else."""


class TrainingTexts(Protocol):
    """Documents in two parts.

    Attributes:
        skips: What reading them for `learned` left out.
        held_out: Whether there are two parts; False if all documents, one or two, fell to the held-out one and are
            learned from.
    """

    skips: SkipReport
    held_out: bool

    def learned(self, on_held_out: Callable[[str, str], None]) -> Iterator[str]:
        """Texts to learn from. `on_held_out` takes each other text and the name of its source."""
        ...

    def documents(self) -> Iterator[Document]:
        """All of them."""
        ...


class PathTexts:
    """Of files, folders, globs and Hub datasets."""

    def __init__(
        self,
        paths: Sequence[str],
        text_column: str | None = None,
        source_column: str | None = None,
        on_bad_row: str | None = None,
    ) -> None:
        """
        Args:
            text_column: Column that holds the text, where rows have columns; None is "text".
            source_column: Column that names each row's source; None is the path.
            on_bad_row: "error" or "skip", for rows that cannot be used; None is "error".
        """
        choices: dict[str | None, Literal["error", "skip"]] = {None: "error", "error": "error", "skip": "skip"}
        if not paths:
            raise UserError("nothing to train on: name files, folders, globs or Hub datasets, or a --recipe")
        if on_bad_row not in choices:
            raise UserError(f"--on-bad-row {on_bad_row} is not known: choose error or skip")
        column = "text" if text_column is None else text_column
        self._sources = [Source(path=path, text_column=column, on_bad_row=choices[on_bad_row]) for path in paths]
        self._source_column = source_column
        self.skips = SkipReport()
        self.held_out = True

    def learned(self, on_held_out: Callable[[str, str], None]) -> Iterator[str]:
        """See `TrainingTexts`."""
        has_text = False
        for document in self._read(self.skips):
            if is_validation(document.text, HELD_OUT):
                on_held_out(document.text, document.source)
            else:
                has_text = True
                yield document.text
        if not has_text:
            self.held_out = False
            yield from (document.text for document in self.documents())

    def documents(self) -> Iterator[Document]:
        """See `TrainingTexts`."""
        return self._read(None)

    def _read(self, skips: SkipReport | None) -> Iterator[Document]:
        for source in self._sources:
            yield from read_documents(source, skips=skips, source_column=self._source_column)


class RecipeTexts:
    """Of a recipe: its sources, with columns, templates and limits, without duplicates, and what it holds out.

    The tokenizer is the one that `tercet data prepare` and `tercet train` make of the recipe.
    """

    def __init__(self, recipe: "Recipe") -> None:
        self._recipe = recipe
        self.skips = SkipReport()
        self.held_out = True

    def learned(self, on_held_out: Callable[[str, str], None]) -> Iterator[str]:
        """See `TrainingTexts`."""
        from tercet.training.preparation import training_texts

        return training_texts(self._recipe, skips=self.skips, on_held_out=on_held_out)

    def documents(self) -> Iterator[Document]:
        """See `TrainingTexts`."""
        from tercet.training.preparation import all_documents

        return all_documents(self._recipe)

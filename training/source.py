"""A source of documents as a recipe writes it, and the files that it means."""

import glob
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from tercet.training.corpus import PYTHON_DOCS, PYTHON_DOCS_DESCRIPTION, PYTHON_DOCS_LICENSE
from tercet.training.documents import DataError
from tercet.training.files import COMPRESSIONS
from tercet.training.hub_sources import is_hub_name
from tercet.training.templates import TextTemplate

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")

_SUFFIXES = (".txt", ".text", ".md", ".markdown", ".rst", *JSON_SUFFIXES, ".csv", ".parquet")
_TEXT_COLUMN = "text"
# What marks a folder of prepared data, or of a run that has some.
_PREPARED = ("shard-*.npz", "data/shard-*.npz")


class Source(BaseModel):
    """One source of documents, as a recipe writes it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str = Field(
        description="a file, a folder, a glob, the name of a Hub dataset, or python-docs, which Python carries"
    )
    name: str | None = Field(default=None, description="configuration of a Hub dataset")
    split: str = Field(default="train", description="split of a Hub dataset")
    revision: str | None = Field(default=None, description="branch, tag or commit of a Hub dataset")
    text_column: str = Field(
        default=_TEXT_COLUMN, description="column or key that holds the text, wherever rows have columns"
    )
    text_template: str | None = Field(
        default=None,
        description='the text from several columns, such as "# {title}\\n\\n{body}"; a null counts as empty',
    )
    messages_column: str | None = Field(
        default=None,
        description="column that holds a conversation, [{role, content}, ...], to be written by the tokenizer's chat "
        "template; only what the assistant writes is learned",
    )
    documents: Literal["file", "lines"] = Field(
        default="file", description="whether a text file is one document or each of its lines is"
    )
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        default=None, description="the source's part in a mixture, by tokens, beside the weights of the others"
    )
    min_chars: int | None = Field(
        default=None, ge=0, description="leave out shorter documents; null takes the section's"
    )
    max_chars: int | None = Field(
        default=None, ge=1, description="leave out longer documents; null takes the section's"
    )
    on_bad_row: Literal["error", "skip"] | None = Field(
        default=None,
        description="whether a row that cannot be used ends the reading or is counted; null takes the section's",
    )
    streaming: bool = Field(
        default=False,
        description="prepare a Hub dataset as it downloads, instead of keeping a copy in the Hugging Face cache; to "
        "train without preparing is data.stream",
    )
    license: str | None = Field(
        default=None, description="what the card says of the text's licence, as the Hub spells it"
    )
    description: str | None = Field(default=None, description="what the card says of the text")

    @field_validator("text_template")
    @classmethod
    def _template_can_be_read(cls, value: str | None) -> str | None:
        if value is not None:
            TextTemplate.parse(value)
        return value

    @model_validator(mode="after")
    def _settings_agree(self) -> Self:
        given = [name for name in ("text_template", "messages_column") if getattr(self, name) is not None]
        if self.text_column != _TEXT_COLUMN:
            given.append("text_column")
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} both say what a document is; give one of them")
        if self.min_chars is not None and self.max_chars is not None and self.min_chars > self.max_chars:
            raise ValueError(f"min_chars ({self.min_chars}) is more than max_chars ({self.max_chars})")
        return self

    @property
    def label(self) -> str:
        """Under which documents and reports name this source: its path, and what else chooses among a Hub dataset's."""
        name = f":{self.name}" if self.name is not None else ""
        split = f"[{self.split}]" if self.split != "train" else ""
        return f"{self.path}{name}{split}"

    def columns(self) -> tuple[str, ...]:
        """The columns that a row is asked for."""
        if self.text_template is not None:
            return TextTemplate.parse(self.text_template).columns
        return (self.messages_column or self.text_column,)

    def license_name(self) -> str | None:
        """The licence that the recipe declares, or that is known of Python's own documentation."""
        return self.license or (PYTHON_DOCS_LICENSE if self.path == PYTHON_DOCS else None)

    def description_text(self) -> str | None:
        """The description that the recipe gives, or that of Python's own documentation."""
        return self.description or (PYTHON_DOCS_DESCRIPTION if self.path == PYTHON_DOCS else None)

    def is_on_hub(self) -> bool:
        """Whether the path names a Hub dataset: it is nothing on this machine."""
        return self.path != PYTHON_DOCS and not local_paths(self.path)


def local_paths(pattern: str) -> list[Path]:
    """The files that the pattern means, sorted; none for a Hub name.

    Raises:
        DataError: If there is no such file, or none in the folder that can be read.
    """
    path = Path(pattern).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        if any(any(path.glob(pattern)) for pattern in _PREPARED):
            run = path.parent if path.name == "data" else path
            raise DataError(
                f"{path} is prepared data, which is no text: to train on it give the recipe and the settings that it "
                f"was prepared with, and its folder as the output: tercet train RECIPE --set ... --output {run}"
            )
        found = sorted(
            p for p in path.rglob("*") if p.is_file() and file_kind(p) and not _is_hidden(p.relative_to(path))
        )
        if not found:
            raise DataError(
                f"The folder {path} holds no file that can be read ({', '.join(_SUFFIXES)}; also with "
                f"{', '.join(COMPRESSIONS)}). For text under other names give a glob, such as '{path}/**/*.py'."
            )
        return found
    if glob.has_magic(pattern):
        found = sorted(Path(p) for p in glob.glob(str(path), recursive=True) if Path(p).is_file())
        if not found:
            raise DataError(f"No file matches {pattern!r}. Check the pattern; '**' goes into subfolders.")
        return found
    if not is_hub_name(pattern) or file_kind(path):
        raise DataError(
            f"{pattern} does not exist. Give a file, a folder, a glob or the name of a Hub dataset; "
            "for a recipe: --set data.path=FILE."
        )
    return []


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def file_kind(path: Path) -> str:
    """The suffix that says how to read the file, in lower case and under any compression; "" if none is known."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in _SUFFIXES else ""

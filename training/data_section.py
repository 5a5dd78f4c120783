"""What a recipe says of its text: the section `data`.

A stream (`stream: true`) is read while training and never prepared. Settings that need all text before the first step
have another default there, and are refused where they were asked for.
"""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from tercet.training.section import Section
from tercet.training.source import Source

DEFAULT_SAMPLE_MB = 64.0


class DataSection(Section):
    """What text to train on and what to hold out."""

    path: str | None = Field(None, description="file, folder, glob, Hub dataset, or python-docs (needs no network)")
    sources: tuple[Source, ...] = Field((), description="several of them, each with its own settings")
    split_by: Literal["document", "tail"] = Field(
        "document", description="hold out whole documents by hash, or the last part of every document"
    )
    validation_fraction: float = Field(0.05, gt=0, lt=1, description="part of the text that is held out")
    drop_duplicates: Literal[True, False, "normalized"] = Field(
        True,
        description="keep one of equal documents; normalized: also of those equal but for white space; false for a "
        "stream",
    )
    stream: bool = Field(
        False, description="train on text as it is read, without preparing it: for sources too large for that"
    )
    stream_sample_mb: float = Field(
        DEFAULT_SAMPLE_MB,
        gt=0,
        allow_inf_nan=False,
        description="of a stream's text, read first: for the tokenizer and to hold out",
    )
    min_chars: int | None = Field(None, ge=0, description="leave out shorter documents; a source may have its own")
    max_chars: int | None = Field(None, ge=1, description="leave out longer documents; a source may have its own")
    on_bad_row: Literal["error", "skip"] = Field(
        "error", description="a row that cannot be used ends the reading, or is left out, counted and reported"
    )

    @model_validator(mode="after")
    def _one_way_to_name_the_data(self) -> Self:
        if (self.path is None) == (not self.sources):
            raise ValueError("give either data.path or data.sources")
        return self

    @model_validator(mode="after")
    def _weights_on_all_or_none(self) -> Self:
        without = [source.label for source in self.sources if source.weight is None]
        if without and len(without) < len(self.sources):
            raise ValueError(
                f"data.sources has weights, but none for {', '.join(without)}; give all of them one, or none"
            )
        labels = [source.label for source in self.sources]
        if not without and (twice := next((label for label in labels if labels.count(label) > 1), None)):
            raise ValueError(f"data.sources names {twice} twice, with a weight each; give it one weight")
        return self

    @model_validator(mode="after")
    def _lengths_agree(self) -> Self:
        for source in self.all_sources():
            least, most = source.min_chars, source.max_chars
            if least is not None and most is not None and least > most:
                raise ValueError(f"data.min_chars ({least}) is more than max_chars ({most}) for {source.label}")
        return self

    @model_validator(mode="after")
    def _conversations_stay_whole(self) -> Self:
        if self.split_by == "tail" and any(source.messages_column for source in self.sources):
            raise ValueError("data.split_by: tail cuts conversations (messages_column) in two; use split_by: document")
        return self

    @model_validator(mode="after")
    def _stream_can_do_it(self) -> Self:
        if not self.stream:
            if self.stream_sample_mb != DEFAULT_SAMPLE_MB:
                raise ValueError("data.stream_sample_mb is of a stream; set data.stream: true, or leave it out")
            return self
        if self.split_by == "tail":
            raise ValueError("data.split_by: tail is not for a stream (data.stream); use split_by: document")
        if self.drop_duplicates:
            raise ValueError(
                f"data.drop_duplicates: {str(self.drop_duplicates).lower()} would have to remember every document of a "
                "stream (data.stream); leave it out, or set it to false"
            )
        if len(self.sources) > 1 and self.weights() is None:
            raise ValueError(
                "data.stream takes turns between data.sources by their weights, as only reading tells how large they "
                "are; give each a weight"
            )
        return self

    def all_sources(self) -> tuple[Source, ...]:
        """The sources, however they were written, each with the settings that this section gives to all."""
        sources = (Source(path=self.path),) if self.path is not None else self.sources
        shared = {"min_chars": self.min_chars, "max_chars": self.max_chars, "on_bad_row": self.on_bad_row}
        return tuple(
            source.model_copy(update={name: value for name, value in shared.items() if getattr(source, name) is None})
            for source in sources
        )

    def weights(self) -> dict[str, float] | None:
        """Each source's part of the tokens under its label, adding up to 1; None where every document counts alike."""
        weights = {source.label: source.weight for source in self.sources if source.weight is not None}
        total = sum(weights.values())
        return {label: weight / total for label, weight in weights.items()} or None


def with_stream_defaults(fields: Any) -> Any:
    """A recipe's values with what a stream decides, where they do not say it: no packing, no search for duplicates."""
    data = fields.get("data") if isinstance(fields, Mapping) else None
    if not isinstance(data, Mapping) or data.get("stream") is not True:
        return fields
    fields = {**fields, "data": {"drop_duplicates": False, **data}}
    if isinstance(training := fields.get("training"), Mapping):
        fields["training"] = {"packing": "concatenate", **training}
    return fields

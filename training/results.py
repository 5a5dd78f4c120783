"""What a run measured: `results.json`, written by the trainer beside the weights and read by the card.

Every number in a model card comes from here, so the record is strict: an unknown key, a missing key, NaN or an
infinity is refused when the record is made, not when someone reads the card.
"""

import json
from datetime import datetime
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tercet.training.atomic import write_atomically
from tercet.training.errors import UserError

RESULTS_NAME = "results.json"

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Measure = Annotated[float, Field(ge=0)]
Text = Annotated[str, Field(min_length=1)]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Versions(_Record):
    """The libraries that ran, as they name themselves."""

    python: Text
    torch: Text
    transformers: Text
    tokenizers: Text
    datasets: Text
    accelerate: Text


class Hardware(_Record):
    """The machine that ran. `device` is "cpu" or the accelerator's own name; `num_cores` are those we may use."""

    device: Text
    processor: Text
    num_processes: Positive
    num_threads: Positive
    num_cores: Positive | None = None


class Source(_Record):
    """One source of text. `hub_id` only for a data set on the Hub; `license` only if the source declares one."""

    name: Text
    documents: Count
    bytes: Count
    license: str | None = None
    description: str | None = None
    hub_id: str | None = None


class Split(_Record):
    """One side of the split; `bytes` are UTF-8 bytes of text, without the end-of-text tokens."""

    documents: Count
    tokens: Count
    bytes: Count


class Stream(_Record):
    """A text that was read while training and not prepared.

    `whole_epochs` is how often each source was read to its end, by the process that is furthest; `held_out` counts the
    documents on the way that validate and `left_out` the rows that gave no document.
    """

    whole_epochs: dict[str, Count]
    held_out: Count
    left_out: Count


class Data(_Record):
    """The text. `language` holds ISO 639 codes, "code" or "multilingual"; empty when nobody declared any.

    Of a stream, `sources` and `train` count what was trained on, in every epoch anew.
    """

    sources: list[Source] = Field(min_length=1)
    language: list[str]
    train: Split
    validation: Split
    stream: Stream | None = None


class TokenizerFacts(_Record):
    """The tokenizer; `bytes_per_token` is measured on the training text."""

    vocab_size: Positive
    bytes_per_token: Measure


class ModelFacts(_Record):
    """Sizes; non-embedding leaves out token and learned position embeddings."""

    num_parameters: Positive
    num_non_embedding_parameters: Count


class Training(_Record):
    """How the weights came about. `mfu` is a fraction; None where the peak of the device is not known.

    `epochs` is how often the text was read; of sources with weights it is that of the one read most often; None for a
    stream, whose length nobody knows.
    """

    num_steps: Count
    tokens_seen: Count
    epochs: Measure | None
    duration_s: Measure
    tokens_per_second: Measure
    mfu: Measure | None = None
    optimizer: Text
    schedule: Text
    precision: Text
    final_loss_nats: Measure


class SourceEvaluation(_Record):
    """Loss per token (nats) and bits per UTF-8 byte on what the validation split holds of one source."""

    loss_nats: Measure
    bits_per_byte: Measure
    num_tokens: Positive
    num_bytes: Positive


class Evaluation(_Record):
    """Loss per token (nats), its exponential, and bits per UTF-8 byte, on the whole validation split.

    `by_source` has the same of each source under its label, where there are several.
    """

    loss_nats: Measure
    perplexity: Measure
    bits_per_byte: Measure
    num_tokens: Positive
    num_bytes: Positive
    by_source: dict[str, SourceEvaluation] = Field(default_factory=dict)


HELD_OUT_TEXT = "held-out text"
"""Name of a run's own validation text where it was measured again, in windows of another length."""


class TextEvaluation(Evaluation):
    """The same on another text: its name (`hub_id` of a data set on the Hub) and the tokens in a window."""

    name: Text
    context: Positive
    hub_id: str | None = None
    date: datetime


class TaskResult(_Record):
    """One metric of one task of lm-eval; `filter` is the harness's name for how answers were taken from outputs.

    `standard_error` is missing where the harness gives none; `num_documents` are those asked, at most `limit`.
    """

    task: Text
    metric: Text
    filter: str = "none"
    value: float
    standard_error: Measure | None = None
    higher_is_better: bool | None = None
    num_fewshot: Count
    num_documents: Count
    version: str = ""
    limit: Positive | None = None


class Tasks(_Record):
    """Answers to tasks of others' harness; `date` and `limit` are those of the newest call."""

    harness: Text
    date: datetime
    limit: Positive | None = None
    results: list[TaskResult] = Field(min_length=1)

    def beside(self, earlier: "Tasks | None") -> "Tasks":
        """These, and what an earlier call of the same harness found of other tasks, or in another way."""
        if earlier is None or earlier.harness != self.harness:
            return self
        ours = {_how_measured(row) for row in self.results}
        kept = [row for row in earlier.results if _how_measured(row) not in ours]
        return self.model_copy(update={"results": [*kept, *self.results]})


def _how_measured(row: TaskResult) -> tuple[str, str, str, int]:
    return row.task, row.metric, row.filter, row.num_fewshot


class Sample(_Record):
    """A continuation exactly as it came out; `settings` says how it was sampled, for a reader."""

    prompt: str
    text: str
    settings: Text


class RunResults(_Record):
    """Everything a run measured.

    Raises:
        pydantic.ValidationError: (a ValueError) on an unknown or missing key, NaN, infinity or a negative measure.
    """

    tercet_version: Text
    date: datetime
    versions: Versions
    hardware: Hardware
    data: Data
    tokenizer: TokenizerFacts
    model: ModelFacts
    training: Training
    evaluation: Evaluation | None = None
    samples: list[Sample] = Field(default_factory=list)
    tasks: Tasks | None = None
    texts: list[TextEvaluation] = Field(default_factory=list)

    def save(self, path: Path) -> None:
        """Write the record as JSON; whoever reads `path` sees the old file or the new one, never half of one."""
        record = json.dumps(self.model_dump(mode="json"), indent=2, ensure_ascii=False, allow_nan=False)
        write_atomically(path, (record + "\n").encode())

    @classmethod
    def load(cls, path: Path) -> "RunResults":
        """Read a record back.

        Raises:
            UserError: One line that names the file, the field and the remedy.
        """
        try:
            return cls.model_validate_json(Path(path).read_bytes())
        except FileNotFoundError:
            raise UserError(f"{path} is missing: no run of Tercet ended here; `tercet train` writes it") from None
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(str(part) for part in first["loc"]) or "the file"
            raise UserError(
                f"{path}: {place}: {first['msg']}; run `tercet eval` (or train again) to measure it anew"
            ) from None

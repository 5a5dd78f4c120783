"""A run in one file: the recipe, read from YAML, checked before anything is touched.

Run facts live here; facts about the model live in `TercetConfig`, whose fields the `model` section takes as they are.
"""

import dataclasses
import difflib
import functools
from collections.abc import Mapping, Sequence
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from tercet.modeling import TercetConfig
from tercet.tokenizer.pretokenization import Words
from tercet.training.batch_sizes import BatchSizes
from tercet.training.errors import UserError, as_user_error
from tercet.training.from_checkpoint import FROM_CHECKPOINT, STARTING_FIELDS, complete_fields
from tercet.training.hub_section import HubSection
from tercet.training.section import Section
from tercet.training.sources import Source


class RecipeError(UserError):
    """A recipe that cannot be run."""


class DataSection(Section):
    """What text to train on and what to hold out."""

    path: str | None = Field(None, description="file, folder, glob, Hub dataset, or python-docs (needs no network)")
    sources: tuple[Source, ...] = Field((), description="several of them, each with its own settings")
    split_by: Literal["document", "tail"] = Field(
        "document", description="hold out whole documents by hash, or the last part of every document"
    )
    validation_fraction: float = Field(0.05, gt=0, lt=1)
    drop_duplicates: Literal[True, False, "normalized"] = Field(
        True, description="keep one of equal documents; normalized: also of those equal but for white space"
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


class TokenizerSection(Section):
    """The vocabulary: trained on the training split, or taken from a folder."""

    vocab_size: int = Field(8192, ge=260, description="256 bytes, 4 special tokens, and the merges")
    words: Words = Field(
        "llama3",
        description="what BPE merges inside: llama3; bloom's longer words, up to a tenth fewer tokens; or whatever is "
        "between blanks, the fewest, which no llama.cpp runs",
    )
    path: str | None = Field(None, description="use this tokenizer folder instead of training one")


class OptimizerSection(Section):
    """Which update rule, how large, how it changes over the run."""

    name: Literal["muon", "adamw"] = Field("muon", description="muon: Muon for matrices, AdamW for everything else")
    learning_rate: float = Field(5e-3, gt=0, description="AdamW's")
    matrix_learning_rate: float = Field(0.02, gt=0, description="Muon's, scaled by 0.2 sqrt(max(rows, columns))")
    weight_decay: float = Field(0.1, ge=0, description="decoupled, on the matrices of the blocks")
    embedding_weight_decay: float = Field(0.0, ge=0, description="the same on embeddings and head")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.95), description="AdamW's; its epsilon is 1e-10"
    )
    clip_norm: float = Field(1.0, gt=0)
    schedule: Literal["cosine", "warmup_stable_decay", "constant"] = "warmup_stable_decay"
    warmup_steps: int = Field(20, ge=0)
    decay_fraction: float = Field(0.6, ge=0, le=1, description="share of the run that warmup_stable_decay decays over")
    decay_steps: int | None = Field(None, ge=1, description="the same in steps, instead of decay_fraction")
    final_fraction: float = Field(0.0, ge=0, le=1, description="learning rate at the end, as a share of its peak")
    z_loss: float = Field(0.0, ge=0, description="times the squared log of the softmax's denominator, per token")
    ema_decay: float | None = Field(None, gt=0, lt=1, description="keep a running average of the weights; it is saved")


class BatchSizeStage(Section):
    """A stage of the batch-size warm-up: the global batch size of the steps before one."""

    until_step: int = Field(ge=1)
    global_batch_size: int = Field(ge=1)


class TrainingSection(Section):
    """How long, how wide, where, and what is kept on the way."""

    num_steps: int = Field(ge=1, description="optimizer steps")
    sequence_length: int = Field(256, ge=2, description="tokens in a row, T")
    global_batch_size: int = Field(32, ge=1, description="rows in a global batch, over all devices")
    per_device_batch_size: int = Field(16, ge=1, description="rows in one forward pass; the rest is accumulated")
    batch_size_warmup: tuple[BatchSizeStage, ...] = Field((), description="smaller global batches at first, in stages")
    branch_from: str | None = Field(
        None, description="checkpoint of another run of the same model and data, whose steps count as this run's"
    )
    packing: Literal["best_fit", "concatenate"] = Field(
        "best_fit", description="whole documents where they fit, or one document behind the other cut every T tokens"
    )
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    sharding: Literal["none", "full"] = Field(
        "none", description="none: every process holds all weights (DDP); full: a part of each (FSDP2)"
    )
    gradient_checkpointing: bool | Annotated[int, Field(ge=1)] = Field(
        False, description="true: activations of every block are computed again; n: of every n-th block"
    )
    compile: bool = Field(False, description="torch.compile the model; needs a C++ compiler")
    num_threads: int | None = Field(None, ge=1, description="CPU threads; None leaves torch's choice")
    log_every: int = Field(10, ge=1)
    evaluate_every: int = Field(100, ge=1)
    save_every: int = Field(200, ge=1)
    sample_every: int | None = Field(None, ge=1, description="show text generated from samples.prompts")
    keep_last: int = Field(2, ge=1, description="checkpoints to keep for resuming")
    keep_every: int | None = Field(None, ge=1, description="keep those of steps that it divides, too")
    keep_best: bool = Field(False, description="save at every best evaluation so far, and keep the best one, too")
    max_hours: float | None = Field(None, gt=0, description="save and end before this time is over, from the start")
    max_bad_steps: int = Field(
        3, ge=0, description="so many steps in a row whose loss or gradient is not finite are left out; one more ends"
    )
    spike_factor: float = Field(
        6.0, gt=1, description="report a loss so many robust standard deviations above the median of 100 logged ones"
    )
    trackers: tuple[Literal["tensorboard", "trackio", "wandb"], ...] = ()

    def batch_sizes(self) -> BatchSizes:
        """Rows of the global batch at every step."""
        stages = ((stage.until_step, stage.global_batch_size) for stage in self.batch_size_warmup)
        return BatchSizes(self.global_batch_size, tuple(stages))


class SamplesSection(Section):
    """Text to generate at the end."""

    prompts: tuple[str, ...] = ()
    max_new_tokens: int = Field(100, ge=1)
    temperature: float = Field(0.7, gt=0)
    top_p: float = Field(0.95, gt=0, le=1)


class CardSection(Section):
    """What the card says and measurement cannot know."""

    license: str | None = None
    language: tuple[str, ...] = ()
    name: str | None = None


class Recipe(Section):
    """Everything that a run depends on."""

    output_dir: str
    seed: int = 0
    data: DataSection
    tokenizer: TokenizerSection = Field(default_factory=lambda: TokenizerSection.model_validate({}))
    model: dict[str, Any] = Field(default_factory=dict, description="fields of TercetConfig; preset or from_checkpoint")
    optimizer: OptimizerSection = Field(default_factory=lambda: OptimizerSection.model_validate({}))
    training: TrainingSection
    samples: SamplesSection = Field(default_factory=lambda: SamplesSection.model_validate({}))
    card: CardSection = Field(default_factory=lambda: CardSection.model_validate({}))
    hub: HubSection | None = None

    @model_validator(mode="after")
    def _batches_divide(self) -> Self:
        training = self.training
        ends = [0, *(stage.until_step for stage in training.batch_size_warmup)]
        if any(after <= before for before, after in pairwise(ends)):
            raise ValueError(f"training.batch_size_warmup: until_step must ascend from stage to stage, not {ends[1:]}")
        if ends[-1] > training.num_steps:
            raise ValueError(
                f"training.batch_size_warmup ends with step {ends[-1]}, after training.num_steps ({training.num_steps})"
            )
        for size in training.batch_sizes():
            if size % training.per_device_batch_size:
                raise ValueError(
                    f"training.global_batch_size ({size}) is not a multiple of "
                    f"training.per_device_batch_size ({training.per_device_batch_size})"
                )
        return self

    @model_validator(mode="after")
    def _lengths_agree(self) -> Self:
        if self.training.sample_every is not None and not self.samples.prompts:
            raise ValueError("training.sample_every continues samples.prompts, and there are none: give some")
        longest = self.model.get("max_position_embeddings", self.training.sequence_length)
        if isinstance(longest, int) and longest < self.training.sequence_length:
            raise ValueError(
                f"training.sequence_length ({self.training.sequence_length}) is beyond "
                f"model.max_position_embeddings ({longest})"
            )
        return self

    def model_config_for(self, vocab_size: int, special_token_ids: Mapping[str, int | None]) -> TercetConfig:
        """The model's config: the recipe's fields, with the tokenizer's sizes and ids.

        Raises:
            RecipeError: Fields that have no meaning together.
        """
        fields = {"max_position_embeddings": self.training.sequence_length, **self.model}
        if fields.get(FROM_CHECKPOINT) is not None:  # its embeddings may have more rows than its tokenizer, or get more
            fields["vocab_size"] = max(vocab_size, fields["vocab_size"])
        fields = {name: value for name, value in fields.items() if name not in STARTING_FIELDS}
        if (size := fields.get("vocab_size", vocab_size)) < vocab_size:
            raise RecipeError(
                f"model.vocab_size is {size} and the tokenizer has {vocab_size} tokens: remove the former"
            )
        make = TercetConfig.classic if fields.pop("preset", "modern") == "classic" else TercetConfig.modern
        with as_user_error("recipe, section model", RecipeError):
            return make(**{"vocab_size": vocab_size, **special_token_ids, **fields})


def load_recipe(path_or_name: str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and apply overrides.

    Args:
        path_or_name: A YAML file, or the name of a recipe that comes with Tercet, such as `demo`.
        overrides: `section.key=value` strings; the value is read as YAML.

    Raises:
        RecipeError: No such file, not YAML, an unknown key, a value of the wrong kind or without meaning.
    """
    text, where = _read_recipe_text(path_or_name)
    try:
        fields = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RecipeError(f"{where} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(fields, dict):
        raise RecipeError(f"{where} holds no recipe: expected keys such as data, model, training")
    for override in overrides:
        _apply_override(fields, override)
    return recipe_from_fields(fields, where)


def recipe_from_fields(fields: Mapping[str, Any], where: str = "recipe") -> Recipe:
    """Check a recipe given as a mapping.

    Raises:
        RecipeError: One line that names every wrong key or value and the nearest known key.
    """
    _check_model_fields(fields.get("model") or {}, where)
    fields = complete_fields(fields, _config_fields(), where)
    try:
        recipe = Recipe.model_validate(fields)
    except ValidationError as error:
        raise RecipeError(f"{where}: " + "; ".join(_explain(item) for item in error.errors())) from error
    recipe.model_config_for(vocab_size=recipe.tokenizer.vocab_size, special_token_ids={})
    return recipe


def recipe_to_yaml(recipe: Recipe) -> str:
    """The recipe with every default written out, as YAML."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _read_recipe_text(path_or_name: str) -> tuple[str, str]:
    path = Path(path_or_name)
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8"), path_or_name
        except UnicodeDecodeError as error:
            raise RecipeError(f"{path_or_name} is not UTF-8 text; a recipe is a YAML file") from error
    built_in = resources.files("tercet.recipes")
    # `recipes/demo.yaml`, `demo.yaml` and `demo` all name the packaged recipe where no such file lies at hand.
    candidate = built_in / f"{path.stem}.yaml"
    if candidate.is_file() and str(path.parent) in (".", "recipes") and path.suffix in ("", ".yaml"):
        return candidate.read_text(encoding="utf-8"), f"recipe {path.stem}"
    names = sorted(item.name.removesuffix(".yaml") for item in built_in.iterdir() if item.name.endswith(".yaml"))
    raise RecipeError(f"no recipe at {path_or_name}; recipes that come with Tercet: {', '.join(names)}")


def _apply_override(fields: dict[str, Any], override: str) -> None:
    key, separator, value = override.partition("=")
    if not separator or not key:
        raise RecipeError(f"--set {override}: expected section.key=value, such as training.num_steps=100")
    *sections, name = key.strip().split(".")
    target = fields
    for section in sections:
        target = target.setdefault(section, {})
        if not isinstance(target, dict):
            raise RecipeError(f"--set {override}: {section} is a value, not a section")
    try:
        target[name] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise RecipeError(f"--set {override}: the value is not YAML") from error


def _check_model_fields(fields: Any, where: str) -> None:
    if not isinstance(fields, Mapping):
        raise RecipeError(f"{where}: model is {fields!r}: expected fields of TercetConfig")
    known = sorted({*_config_fields(), "preset", *STARTING_FIELDS})
    for name in fields:
        if name not in known:
            raise RecipeError(f"{where}: unknown key model.{name}{_nearest(name, known)}")
    if fields.get("preset", "modern") not in ("modern", "classic"):
        raise RecipeError(f"{where}: model.preset is {fields['preset']!r}: choose modern or classic")


@functools.cache
def _config_fields() -> frozenset[str]:
    from transformers import PretrainedConfig

    return frozenset(field.name for field in dataclasses.fields(TercetConfig)) - frozenset(
        field.name for field in dataclasses.fields(PretrainedConfig)
    )


def _nearest(name: str, known: Sequence[str]) -> str:
    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {matches[0]}?" if matches else f"; known: {', '.join(known)}"


def _explain(item: Any) -> str:
    """One pydantic error in words."""
    location = [str(part) for part in item["loc"]]
    if item["type"] == "extra_forbidden":
        return f"unknown key {'.'.join(location)}{_nearest(location[-1], _known_keys(location[:-1]))}"
    if item["type"] == "missing":
        return f"{'.'.join(location)} is missing"
    message = item["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    if not location:
        return message
    value = "" if isinstance(item["input"], (dict, BaseModel)) else f" is {item['input']!r}"
    return f"{'.'.join(location)}{value}: {message}"


def _known_keys(location: Sequence[str]) -> list[str]:
    section: Any = Recipe
    for part in location:
        if not part.isdigit():
            annotation = section.model_fields[part].annotation
            # A tuple of sections: its entries' class.
            section = next((a for a in getattr(annotation, "__args__", ()) if hasattr(a, "model_fields")), annotation)
    return sorted(section.model_fields)

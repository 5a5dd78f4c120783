"""A run in one file: the recipe, read from YAML, checked before anything is touched.

Run facts live here; facts about the model live in `TercetConfig`, whose fields the `model` section takes as they are.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import Field, ValidationError, model_validator

from tercet.modeling import TercetConfig
from tercet.tokenizer.pretokenization import Words
from tercet.training.batch_sizes import BatchSizes
from tercet.training.built_in_recipes import recipe_names, recipe_text
from tercet.training.data_section import DataSection, with_stream_defaults
from tercet.training.errors import UserError, as_user_error
from tercet.training.from_checkpoint import FROM_CHECKPOINT, STARTING_FIELDS, complete_fields
from tercet.training.hub_section import HubSection
from tercet.training.recipe_keys import config_fields
from tercet.training.recipe_mistakes import explain, model_mistakes
from tercet.training.section import Section


class RecipeError(UserError):
    """A recipe that cannot be run."""


class TokenizerSection(Section):
    """The vocabulary: trained on the training split, or taken from a folder."""

    vocab_size: int = Field(8192, ge=260, description="256 bytes, 4 special tokens, and the merges")
    words: Words = Field(
        "llama3",
        description="what BPE merges inside, from more tokens to fewer: llama3; bloom's words; clauses; whatever is "
        "between blanks, which no llama.cpp runs",
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
    clip_norm: float = Field(1.0, gt=0, description="longest gradient; a longer one is scaled down to it")
    schedule: Literal["cosine", "warmup_stable_decay", "constant"] = Field(
        "warmup_stable_decay", description="how the learning rates change after the warm-up"
    )
    warmup_steps: int = Field(20, ge=0, description="steps over which the learning rates rise from 0")
    decay_fraction: float = Field(0.6, ge=0, le=1, description="share of the run that warmup_stable_decay decays over")
    decay_steps: int | None = Field(None, ge=1, description="the same in steps, instead of decay_fraction")
    final_fraction: float = Field(0.0, ge=0, le=1, description="learning rate at the end, as a share of its peak")
    z_loss: float = Field(0.0, ge=0, description="times the squared log of the softmax's denominator, per token")
    ema_decay: float | None = Field(None, gt=0, lt=1, description="keep a running average of the weights; it is saved")


class BatchSizeStage(Section):
    """A stage of the batch-size warm-up: the global batch size of the steps before one."""

    until_step: int = Field(ge=1, description="the stage ends with this step")
    global_batch_size: int = Field(ge=1, description="rows in a global batch until then")


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
        "best_fit",
        description="whole documents where they fit, or one document behind the other cut every T tokens; concatenate "
        "for a stream",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: CUDA where it is, else the CPU")
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="auto: bfloat16 on a GPU that computes in it, else float32; weights stay float32"
    )
    sharding: Literal["none", "full"] = Field(
        "none", description="none: every process holds all weights (DDP); full: a part of each (FSDP2)"
    )
    gradient_checkpointing: bool | Annotated[int, Field(ge=1)] = Field(
        False, description="true: activations of every block are computed again; n: of every n-th block"
    )
    compile: bool = Field(False, description="torch.compile the model; needs a C++ compiler")
    num_threads: int | None = Field(None, ge=1, description="CPU threads; None leaves torch's choice")
    log_every: int = Field(10, ge=1, description="steps between two lines of metrics.jsonl")
    evaluate_every: int = Field(100, ge=1, description="steps between two evaluations on what is held out")
    save_every: int = Field(200, ge=1, description="steps between two checkpoints")
    sample_every: int | None = Field(None, ge=1, description="steps between two samples of samples.prompts")
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
    trackers: tuple[Literal["tensorboard", "trackio", "wandb"], ...] = Field((), description="also log there")

    def batch_sizes(self) -> BatchSizes:
        """Rows of the global batch at every step."""
        stages = ((stage.until_step, stage.global_batch_size) for stage in self.batch_size_warmup)
        return BatchSizes(self.global_batch_size, tuple(stages))


class SamplesSection(Section):
    """Text to generate at the end."""

    prompts: tuple[str, ...] = Field((), description="beginnings to go on from; an empty one is a document's start")
    max_new_tokens: int = Field(100, ge=1, description="tokens to generate from each")
    temperature: float = Field(0.7, gt=0, description="divides the logits: below 1 more likely tokens, above 1 rarer")
    top_p: float = Field(0.95, gt=0, le=1, description="draw among the likeliest tokens that have this probability")


class CardSection(Section):
    """What the card says and measurement cannot know."""

    license: str | None = Field(None, description="of the weights, as the Hub spells it, such as apache-2.0")
    language: tuple[str, ...] = Field((), description="of the text, as ISO codes, such as [en]")
    name: str | None = Field(None, description="the model's name; else that of its folder or repository")


class Recipe(Section):
    """Everything that a run depends on."""

    output_dir: str = Field(description="folder of the run; --output instead of it")
    seed: int = Field(0, description="decides weights, order of the data, dropout and samples")
    data: DataSection
    tokenizer: TokenizerSection = Field(default_factory=lambda: TokenizerSection.model_validate({}))
    model: dict[str, Any] = Field(default_factory=dict, description="fields of TercetConfig; preset or from_checkpoint")
    optimizer: OptimizerSection = Field(default_factory=lambda: OptimizerSection.model_validate({}))
    training: TrainingSection
    samples: SamplesSection = Field(default_factory=lambda: SamplesSection.model_validate({}))
    card: CardSection = Field(default_factory=lambda: CardSection.model_validate({}))
    hub: HubSection | None = None

    @model_validator(mode="before")
    @classmethod
    def _stream_decides(cls, fields: Any) -> Any:
        return with_stream_defaults(fields)

    @model_validator(mode="after")
    def _stream_is_not_packed(self) -> Self:
        if self.data.stream and self.training.packing != "concatenate":
            raise ValueError(
                f"training.packing: {self.training.packing} looks at all documents before the first row, which a "
                "stream (data.stream) cannot: leave it out, or set it to concatenate"
            )
        return self

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
        raise RecipeError(f"{where} is not YAML{_where_in_yaml(error)}; a recipe is a YAML file") from error
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
    fields = complete_fields(fields, frozenset(field.name for field in config_fields()), where)
    try:
        recipe = Recipe.model_validate(fields)
    except ValidationError as error:
        raise RecipeError(f"{where}: {'; '.join(explain(error.errors(), Recipe))}") from error
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
    names = recipe_names()
    # `recipes/demo.yaml`, `demo.yaml` and `demo` all name the packaged recipe where no such file lies at hand.
    if path.stem in names and str(path.parent) in (".", "recipes") and path.suffix in ("", ".yaml"):
        return recipe_text(path.stem), f"recipe {path.stem}"
    raise RecipeError(f"no recipe at {path_or_name}; recipes that come with Tercet: {', '.join(names)}")


def _where_in_yaml(error: yaml.YAMLError) -> str:
    """Line and reason: YAML's own message quotes the text and counts from 0."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    place = "" if mark is None else f" (line {mark.line + 1}, column {mark.column + 1}"
    return "" if not place else f"{place}: {problem or 'cannot be read'})"


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
    if mistakes := model_mistakes(fields, Recipe):
        raise RecipeError(f"{where}: {'; '.join(mistakes)}")

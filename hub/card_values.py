"""What a model card says, as values: the front matter that the Hub reads, and what `hub_card.md` names.

Every number comes from the record of the run; text that others wrote is made safe for the place where it will stand.
"""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any

from tercet.training.curve import METRICS_NAME, read_metrics
from tercet.training.errors import UserError
from tercet.training.results import Evaluation, RunResults

if TYPE_CHECKING:
    from huggingface_hub import EvalResult, ModelCardData

# A table of a config's fields by their usual names, GPT-2's own spelling beside them.
_SHAPE = (
    ("Layers", ("num_hidden_layers", "n_layer")),
    ("Hidden size", ("hidden_size", "n_embd")),
    ("Query heads", ("num_attention_heads", "n_head")),
    ("Key/value heads", ("num_key_value_heads",)),
    ("Head size", ("head_dim",)),
    ("MLP size", ("intermediate_size", "n_inner")),
    ("MLP", ("mlp_type",)),
    ("Norm", ("norm_type",)),
    ("Positions", ("position_embedding_type",)),
    ("Longest context (tokens)", ("max_position_embeddings", "n_positions")),
    ("Sliding window (tokens)", ("sliding_window",)),
)


@dataclass(frozen=True)
class Loading:
    """How a reader loads what lies in the repository.

    Attributes:
        revision: A branch other than main.
        native_family: Whose export lies beside, in a folder of that name.
    """

    revision: str | None = None
    native_family: str | None = None

    def options(self, needs_code: bool) -> str:
        """What stands behind the name in `from_pretrained`."""
        options = "" if self.revision is None else f", revision={json.dumps(self.revision)}"
        return options + (", trust_remote_code=True" if needs_code else "")


@dataclass(frozen=True)
class Origin:
    """What the recipe says of how the weights came about.

    Attributes:
        base_model: The repository on the Hub that they began as.
        is_chat: Whether they were trained on conversations.
    """

    base_model: str | None = None
    is_chat: bool = False

    @classmethod
    def of(cls, recipe: dict[str, Any]) -> "Origin":
        """Read it from a recipe's values; a folder of this machine is nothing that a reader could find."""
        begins = str((recipe.get("model") or {}).get("from_checkpoint") or "")
        base = begins.removeprefix("hf://").partition("@")[0] if begins.startswith("hf://") else None
        sources = (recipe.get("data") or {}).get("sources") or []
        return cls(base, any(isinstance(source, dict) and source.get("messages_column") for source in sources))


def card_data(
    name: str, config: dict[str, Any], origin: Origin, results: RunResults, license: str | None
) -> "ModelCardData":
    """The front matter: what the Hub reads."""
    from huggingface_hub import ModelCardData

    hub_ids = [source.hub_id for source in results.data.sources if source.hub_id]
    return ModelCardData(
        license=license or "unknown",
        language=results.data.language or None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=[
            "tercet",
            config["model_type"],
            *(["custom_code"] if "auto_map" in config else []),
            *(["conversational"] if origin.is_chat else []),
        ],
        base_model=origin.base_model,
        datasets=hub_ids or None,
        model_name=name,
        eval_results=[*_of_validation(results), *_of_texts(results), *_of_tasks(results)] or None,
    )


def _of_validation(results: RunResults) -> "list[EvalResult]":
    if results.evaluation is None:
        return []
    sources = results.data.sources
    hub_ids = [source.hub_id for source in sources if source.hub_id]
    return _of_text(
        results.evaluation,
        dataset_type=hub_ids[0] if len(hub_ids) == len(sources) == 1 else "text",
        dataset_name=" + ".join(public(source.name) for source in sources),
        dataset_split="validation",
    )


def _of_texts(results: RunResults) -> "list[EvalResult]":
    return [
        measure
        for text in results.texts
        for measure in _of_text(text, dataset_type=text.hub_id or "text", dataset_name=public(text.name))
    ]


def _of_text(evaluation: Evaluation, **data: Any) -> "list[EvalResult]":
    from huggingface_hub import EvalResult

    measures = (
        ("bits_per_byte", "Bits per byte", evaluation.bits_per_byte),
        ("loss", "Loss (nats per token)", evaluation.loss_nats),
        ("perplexity", "Perplexity", evaluation.perplexity),
    )
    return [
        EvalResult(task_type="text-generation", metric_type=metric, metric_name=title, metric_value=value, **data)
        for metric, title, value in measures
    ]


def _of_tasks(results: RunResults) -> "list[EvalResult]":
    from huggingface_hub import EvalResult

    measured = []
    for row in results.tasks.results if results.tasks else []:
        name = row.metric if row.filter == "none" else f"{row.metric} ({row.filter})"
        measured.append(
            EvalResult(
                task_type="text-generation",
                dataset_type=row.task,
                dataset_name=row.task,
                metric_type=row.metric,
                metric_name=f"{name}, {row.num_fewshot} shots" if row.num_fewshot else name,
                metric_value=row.value,
            )
        )
    return measured


def card_context(
    folder: Path,
    name: str,
    repo_id: str | None,
    config: dict[str, Any],
    recipe: str,
    origin: Origin,
    results: RunResults,
    license: str | None,
    loading: Loading,
) -> dict[str, Any]:
    """Everything the template names, as text that is safe where it stands."""
    sources = [
        {
            "name": _cell(public(source.name)),
            "documents": source.documents,
            "bytes": source.bytes,
            "license": _cell(source.license or "not declared"),
            "description": _cell(source.description or ""),
        }
        for source in results.data.sources
    ]
    samples = [
        {"prompt": fence(sample.prompt), "text": fence(sample.text), "settings": _cell(sample.settings)}
        for sample in results.samples
    ]
    # An empty prompt has no token to start from.
    prompt = next((sample.prompt for sample in results.samples if sample.prompt.strip()), "The")
    model = results.model
    return {
        "title": name,
        "summary": f"A decoder-only language model of {model.num_parameters:,} parameters, trained on "
        f"{results.training.tokens_seen:,} tokens with Tercet.",
        "facts": _facts(config, results),
        "needs_code": "auto_map" in config,
        "repo_id": repo_id,
        "load_name": json.dumps(repo_id or folder.resolve().name, ensure_ascii=False),
        "load_options": loading.options("auto_map" in config),
        "native_family": loading.native_family,
        "load_prompt": json.dumps(prompt, ensure_ascii=False),
        "sources": sources,
        "splits": [("train", results.data.train), ("validation", results.data.validation)],
        "results": results,
        "procedure": [(title, _cell(value)) for title, value in _procedure(results)],
        "by_source": [
            (_cell(public(label)), measured)
            for label, measured in (results.evaluation.by_source if results.evaluation else {}).items()
        ],
        "texts": [
            {"name": _cell(public(text.name)), "context": text.context, "measured": text} for text in results.texts
        ],
        "tasks": _tasks(results),
        "has_curve": (folder / "loss.png").is_file(),
        "history": _history(folder / METRICS_NAME),
        "samples": samples,
        "limitations": _limitations(config, origin, results, license),
        "recipe": fence(recipe, "yaml"),
        "date": results.date.date().isoformat(),
    }


def _facts(config: dict[str, Any], results: RunResults) -> list[tuple[str, str]]:
    facts = [
        ("Parameters", f"{results.model.num_parameters:,}"),
        ("Parameters outside the embeddings", f"{results.model.num_non_embedding_parameters:,}"),
        ("Architecture", config["model_type"]),
    ]
    for title, fields in _SHAPE:
        value = next((config[field] for field in fields if config.get(field) is not None), None)
        if value is not None:
            facts.append((title, f"{value:,}" if isinstance(value, int) else _cell(str(value))))
    return facts


def _procedure(results: RunResults) -> list[tuple[str, str]]:
    training, hardware, versions = results.training, results.hardware, results.versions
    where = hardware.processor if hardware.device == "cpu" else f"{hardware.device}; {hardware.processor}"
    if hardware.num_cores:
        where += f", {hardware.num_cores} cores"
    rows = [
        ("Steps", f"{training.num_steps:,}"),
        ("Tokens seen", f"{training.tokens_seen:,}"),
        ("Epochs", f"{training.epochs:.2f}"),
        ("Optimizer", training.optimizer),
        ("Learning rate schedule", training.schedule),
        ("Precision", training.precision),
        ("Training loss at the end (nats per token)", f"{training.final_loss_nats:.4f}"),
        ("Duration", _duration(training.duration_s)),
        ("Speed", f"{training.tokens_per_second:,.0f} tokens per second"),
    ]
    if training.mfu is not None:
        rows.append(("Model FLOPs utilization", f"{training.mfu:.1%}"))
    rows += [
        ("Hardware", where),
        ("Processes × threads", f"{hardware.num_processes} × {hardware.num_threads}"),  # noqa: RUF001
        ("Versions", ", ".join(f"{name} {number}" for name, number in versions.model_dump().items())),
    ]
    return rows


def _tasks(results: RunResults) -> list[dict[str, str]]:
    """Rows of the table of tasks."""
    rows = results.tasks.results if results.tasks else []
    return [
        {
            "task": _cell(row.task),
            "metric": _cell(row.metric if row.filter == "none" else f"{row.metric} ({row.filter})"),
            "value": f"{row.value:.4f}" + ("" if row.standard_error is None else f" ± {row.standard_error:.4f}"),
            "documents": f"{row.num_documents:,}" + ("" if row.limit is None else f" (at most {row.limit:,})"),
            "shots": str(row.num_fewshot),
        }
        for row in rows
    ]


def _limitations(config: dict[str, Any], origin: Origin, results: RunResults, license: str | None) -> list[str]:
    """Only what follows from the record."""
    training, data = results.training, results.data
    names = ", ".join(_cell(public(source.name)) for source in data.sources)
    per_parameter = training.tokens_seen / results.model.num_parameters
    limits = [
        f"Its run showed it {training.tokens_seen:,} tokens ({per_parameter:.3g} per parameter), all of them from "
        f"{names}.",
        "That run trained it to answer as the assistant does in those conversations, and not to be right or safe."
        if origin.is_chat
        else "That run trained it to predict the next token of that text: it continues text, and was not tuned to "
        "follow instructions or to be safe.",
    ]
    if origin.base_model is not None:
        limits.append(f"It began as {_cell(origin.base_model)}, and has what that model has.")
    if training.epochs > 1:
        limits.append(f"It read its training text {training.epochs:.2f} times.")
    context = config.get("max_position_embeddings", config.get("n_positions"))
    if context is not None:
        limits.append(f"Its positions are made for at most {context:,} tokens.")
    if results.evaluation:
        others = [*(["the other text"] if results.texts else []), *(["the tasks"] if results.tasks else [])]
        beside = f"Beside {' and '.join(others)} named there, nothing" if others else "Nothing"
        missing = ["neither other text, nor facts", "neither facts"][bool(results.texts)]
        limits.append(
            f"The measures above are of held-out text from the same sources. {beside} else was measured: {missing}, "
            "nor bias."
        )
    else:
        limits.append("Nothing was measured on held-out text.")
    if license is None:
        limits.append("Nobody declared a licence for the weights; the licences of the sources stand above.")
    return limits


def _history(path: Path) -> list[dict[str, Any]]:
    """At most eight of the evaluations of the run, evenly spread, the first and the last among them."""
    if not path.is_file():
        return []
    validation = read_metrics(path).validation
    steps = [step for step in sorted(validation) if "tokens" in validation[step]]
    if len(steps) < 2:
        return []
    number = min(8, len(steps))
    kept = [steps[round(index * (len(steps) - 1) / (number - 1))] for index in range(number)]
    history = []
    for step in kept:
        loss = float(validation[step]["validation_loss_nats"])
        if not math.isfinite(loss):
            raise UserError(f"{path}: validation_loss_nats at step {step} is {loss}: the run diverged; train again")
        history.append({"step": step, "tokens": int(validation[step]["tokens"]), "loss_nats": loss})
    return history


def strings(value: Any) -> set[str]:
    """All texts inside of lists and mappings."""
    if isinstance(value, str):
        return {value}
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return set().union(*(strings(item) for item in inside))


def public(text: str) -> str:
    """The last part of an absolute path; any other text as it is."""
    for kind in (PurePosixPath, PureWindowsPath):
        if (kind(text).is_absolute() or text.startswith("~/")) and kind(text).name:
            return kind(text).name
    return text


def fence(text: str, language: str = "text") -> str:
    """A code block whose fence is longer than any run of backticks inside, so that nothing can close it early."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}{'' if text.endswith(chr(10)) else chr(10)}{fence}"


def _cell(text: str) -> str:
    """One line that stays in its table cell."""
    return " ".join(text.split()).replace("|", "\\|")


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"

"""What a model card says, as values: the front matter that the Hub reads, and what `hub_card.md` names.

Every number comes from the record of the run, or from the weights themselves; text that others wrote is made safe for
the place where it will stand.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tercet.hub.card_record import record_context, run_limitations
from tercet.hub.card_text import cell, public
from tercet.hub.weights import count_parameters
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


@dataclass(frozen=True)
class Subject:
    """What a card is about.

    Attributes:
        name: Of the model.
        repo_id: Where readers load it from; None where that is a folder.
        config: Of the model.
        license: As declared, if it was.
        license_file: Its text, where that lies beside the weights.
        origin: What the recipe says.
        loading: How readers load it.
    """

    name: str
    repo_id: str | None
    config: dict[str, Any]
    license: str | None
    license_file: str | None
    origin: Origin
    loading: Loading

    @property
    def needs_code(self) -> bool:
        """Whether its code lies beside the weights, and must be trusted."""
        return "auto_map" in self.config


def card_data(subject: Subject, results: RunResults | None) -> "ModelCardData":
    """The front matter: what the Hub reads.

    Args:
        results: Of the run; None where no run is on record.
    """
    from huggingface_hub import ModelCardData

    hub_ids = [source.hub_id for source in results.data.sources if source.hub_id] if results else []
    # The Hub wants a name for a licence that it does not know, and shows the link under it.
    has_own_license = subject.license == "other" and subject.license_file is not None
    return ModelCardData(
        license=subject.license or "unknown",
        license_name=f"{subject.name}-license" if has_own_license else None,
        license_link=subject.license_file if has_own_license else None,
        language=(results.data.language or None) if results else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=[
            "tercet",
            subject.config["model_type"],
            *(["custom_code"] if subject.needs_code else []),
            *(["conversational"] if subject.origin.is_chat else []),
        ],
        base_model=subject.origin.base_model,
        datasets=hub_ids or None,
        model_name=subject.name,
        eval_results=([*_of_validation(results), *_of_texts(results), *_of_tasks(results)] or None)
        if results
        else None,
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
    """Of each text that was scored; what tells one from another is its type and configuration, not its name."""
    return [
        measure
        for text in results.texts
        for measure in _of_text(
            text,
            settings=f", windows of {text.context:,} tokens",
            dataset_type=text.hub_id or "text",
            dataset_name=public(text.name),
            dataset_config=None if text.hub_id else public(text.name),
        )
    ]


def _of_text(evaluation: Evaluation, *, settings: str = "", **data: Any) -> "list[EvalResult]":
    from huggingface_hub import EvalResult

    measures = (
        ("bits_per_byte", "Bits per byte", evaluation.bits_per_byte),
        ("loss", "Loss (nats per token)", evaluation.loss_nats),
        ("perplexity", "Perplexity", evaluation.perplexity),
    )
    return [
        EvalResult(
            task_type="text-generation", metric_type=metric, metric_name=title + settings, metric_value=value, **data
        )
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


def card_context(folder: Path, subject: Subject, recipe: str | None, results: RunResults | None) -> dict[str, Any]:
    """Everything the template names, as text that is safe where it stands.

    Args:
        recipe: Its text; None where no run is on record.
        results: Of the run, likewise.
    """
    prompts = [sample.prompt for sample in results.samples] if results else []
    num_parameters = results.model.num_parameters if results else count_parameters(folder)
    made = f"trained on {results.training.tokens_seen:,} tokens with Tercet" if results else "as a Tercet checkpoint"
    if not subject.needs_code and not results:
        made = f"as a native {subject.config['model_type']} model"
    return {
        "title": subject.name,
        "summary": f"A decoder-only language model of {num_parameters:,} parameters, {made}.",
        "facts": _facts(subject.config, num_parameters, results),
        "needs_code": subject.needs_code,
        "repo_id": subject.repo_id,
        "load_name": json.dumps(subject.repo_id or folder.resolve().name, ensure_ascii=False),
        "load_options": subject.loading.options(subject.needs_code),
        "native_family": subject.loading.native_family,
        # An empty prompt has no token to start from.
        "load_prompt": json.dumps(next(filter(str.strip, prompts), "The"), ensure_ascii=False),
        "results": results,
        "limitations": _limitations(subject, results),
        **(record_context(folder, recipe, results) if recipe is not None and results is not None else {}),
    }


def _facts(config: dict[str, Any], num_parameters: int, results: RunResults | None) -> list[tuple[str, str]]:
    facts = [("Parameters", f"{num_parameters:,}")]
    if results:
        facts.append(("Parameters outside the embeddings", f"{results.model.num_non_embedding_parameters:,}"))
    facts.append(("Architecture", config["model_type"]))
    for title, fields in _SHAPE:
        value = next((config[field] for field in fields if config.get(field) is not None), None)
        if value is not None:
            facts.append((title, f"{value:,}" if isinstance(value, int) else cell(str(value))))
    return facts


def _limitations(subject: Subject, results: RunResults | None) -> list[str]:
    """Only what follows from the record, or from there being none."""
    limits = [
        "Nothing is recorded of the text it was trained on, and nothing was measured: neither how well it continues "
        "text, nor facts, nor bias, nor safety."
    ]
    if results:
        limits = run_limitations(results, is_chat=subject.origin.is_chat)
    if subject.origin.base_model is not None:
        limits.append(f"It began as {cell(subject.origin.base_model)}, and has what that model has.")
    context = subject.config.get("max_position_embeddings", subject.config.get("n_positions"))
    if context is not None:
        limits.append(f"Its positions are made for at most {context:,} tokens.")
    if subject.license is None:
        sources = "; the licences of the sources stand above" if results else ""
        limits.append(f"Nobody declared a licence for the weights{sources}.")
    return limits

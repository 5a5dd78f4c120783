"""Fills `hub_card.md` with what a run measured, and checks the result offline.

Only the checkpoint folder is read: `config.json`, `recipe.yaml`, `results.json`, and, where they are there,
`metrics.jsonl` and `loss.png`. A value that was not measured has no line in the card; a hole is an error.
"""

import json
import math
import re
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any

from tercet.training.atomic import write_atomically
from tercet.training.curve import METRICS_NAME, read_metrics
from tercet.training.errors import UserError
from tercet.training.results import RESULTS_NAME, RunResults

if TYPE_CHECKING:
    from huggingface_hub import ModelCardData

CARD_NAME = "README.md"
TEMPLATE_NAME = "hub_card.md"
_REQUIRED = ("license", "library_name", "pipeline_tag", "tags")
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


def build_card(checkpoint: Path, *, repo_id: str | None = None, license: str | None = None) -> str:
    """The text of the model card of a checkpoint folder, checked.

    Args:
        checkpoint: A folder that `tercet train` wrote.
        repo_id: The Hub repository that the reader will load from; without it, the folder's own name.
        license: The licence of the weights as the Hub spells it ("apache-2.0"). Nobody can measure it: without it, and
            without `card.license` in the recipe, the card says "unknown".

    Raises:
        UserError: One line that says what is wrong, where, and what to do.
    """
    import yaml

    folder = Path(checkpoint)
    config, recipe, results = _read(folder)
    declared = yaml.safe_load(recipe).get("card") or {}
    license = license or declared.get("license")
    name = repo_id.rpartition("/")[2] if repo_id else declared.get("name") or folder.resolve().name
    data = _card_data(name, config, results, license)
    text = _render(data.to_yaml(), _context(folder, name, repo_id, config, recipe, results, license))
    check_card(text)
    return text


def write_card(checkpoint: Path, *, repo_id: str | None = None, license: str | None = None) -> Path:
    """Write `build_card`'s text as `README.md` into the folder, whole or not at all; returns its path."""
    path = Path(checkpoint) / CARD_NAME
    write_atomically(path, build_card(checkpoint, repo_id=repo_id, license=license).encode())
    return path


def check_card(text: str) -> None:
    """Check a card as far as that goes without the Hub.

    Fenced code is left out of the search for holes: samples and recipes are verbatim and may hold anything.

    Raises:
        UserError: One line that names the first thing wrong.
    """
    import yaml
    from huggingface_hub import ModelCard

    if not text.startswith("---\n"):
        raise UserError("the card has no front matter: its first line must be ---")
    try:
        data = ModelCard(text).data.to_dict()
    except (yaml.YAMLError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"the card's front matter does not parse: {' '.join(str(error).split())}") from None
    for field in _REQUIRED:
        if not data.get(field):
            raise UserError(f"the card's front matter has no {field}: add it")
    if data["pipeline_tag"] != "text-generation":
        raise UserError(f"the card's pipeline_tag is {data['pipeline_tag']!r}: it must be text-generation")
    _refuse_holes(data, "front matter")
    prose = _without_fences(text)
    for mark in ("{{", "{%"):
        if mark in prose:
            raise UserError(f"the card holds {mark}, a template's mark that was not filled: render it with build_card")
    # A whole cell, or a whole value after a colon; "None of them" in a description is plain English.
    hole = re.search(r"[|:=]\s*\**(None|nan|NaN|-?inf)\**\s*(?:[|.,;]|$)", prose, re.MULTILINE)
    if hole:
        line = prose.count("\n", 0, hole.start()) + 1
        raise UserError(f"the card's line {line} (code left out) shows {hole[1]} for a value: measure it or drop it")


def template_path() -> Path:
    """Where the template lies: beside this file in an installed wheel, at the root in a checkout."""
    here = Path(__file__).resolve()
    for path in (here.with_name(TEMPLATE_NAME), here.parent.parent / TEMPLATE_NAME):
        if path.is_file():
            return path
    raise UserError(f"{TEMPLATE_NAME} is missing beside {here.name}: install Tercet again")


def _read(folder: Path) -> tuple[dict[str, Any], str, RunResults]:
    """config.json, the recipe's text, and the results."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder: give a checkpoint folder that `tercet train` wrote")
    for name in ("config.json", "recipe.yaml"):
        if not (folder / name).is_file():
            raise UserError(f"{folder} has no {name}, so it is no Tercet checkpoint: give what `tercet train` wrote")
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{folder / 'config.json'} is not JSON ({error}): save the model again") from None
    if not isinstance(config, dict) or "model_type" not in config:
        raise UserError(f"{folder / 'config.json'} names no model_type: save the model again")
    return config, _read_recipe(folder / "recipe.yaml"), RunResults.load(folder / RESULTS_NAME)


def _read_recipe(path: Path) -> str:
    """The recipe's text, absolute paths cut to their last part: a card must not tell how a machine is laid out."""
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        recipe = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not YAML ({' '.join(str(error).split())}): copy the recipe there again") from None
    if not isinstance(recipe, dict):
        raise UserError(f"{path} holds no recipe: copy the recipe there again")
    for value in sorted(_strings(recipe), key=len, reverse=True):
        if _public(value) != value:
            kept = _public(value).replace("\\", r"\\")
            text = re.sub(rf"(?<![\w./~-]){re.escape(value)}(?![\w./-])", kept, text)
    if any(_public(value) != value for value in _strings(yaml.safe_load(text))):
        raise UserError(f"{path} holds an absolute path in a form that cannot be shortened: write it without escapes")
    return text


def _strings(value: Any) -> set[str]:
    if isinstance(value, str):
        return {value}
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return set().union(*(_strings(item) for item in inside))


def _public(text: str) -> str:
    """The last part of an absolute path; any other text as it is."""
    for kind in (PurePosixPath, PureWindowsPath):
        if (kind(text).is_absolute() or text.startswith("~/")) and kind(text).name:
            return kind(text).name
    return text


def _card_data(name: str, config: dict[str, Any], results: RunResults, license: str | None) -> "ModelCardData":
    from huggingface_hub import EvalResult, ModelCardData

    sources = results.data.sources
    hub_ids = [source.hub_id for source in sources if source.hub_id]
    measured: list[EvalResult] = []
    if results.evaluation:
        for metric, title, value in (
            ("bits_per_byte", "Bits per byte", results.evaluation.bits_per_byte),
            ("loss", "Loss (nats per token)", results.evaluation.loss_nats),
            ("perplexity", "Perplexity", results.evaluation.perplexity),
        ):
            measured.append(
                EvalResult(
                    task_type="text-generation",
                    dataset_type=hub_ids[0] if len(hub_ids) == len(sources) == 1 else "text",
                    dataset_name=" + ".join(_public(source.name) for source in sources),
                    dataset_split="validation",
                    metric_type=metric,
                    metric_name=title,
                    metric_value=value,
                )
            )
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
    return ModelCardData(
        license=license or "unknown",
        language=results.data.language or None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["tercet", config["model_type"], *(["custom_code"] if "auto_map" in config else [])],
        datasets=hub_ids or None,
        model_name=name,
        eval_results=measured or None,
    )


def _context(
    folder: Path,
    name: str,
    repo_id: str | None,
    config: dict[str, Any],
    recipe: str,
    results: RunResults,
    license: str | None,
) -> dict[str, Any]:
    """Everything the template names, as text that is safe where it stands."""
    sources = [
        {
            "name": _cell(_public(source.name)),
            "documents": source.documents,
            "bytes": source.bytes,
            "license": _cell(source.license or "not declared"),
            "description": _cell(source.description or ""),
        }
        for source in results.data.sources
    ]
    samples = [
        {"prompt": _fence(sample.prompt), "text": _fence(sample.text), "settings": _cell(sample.settings)}
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
        "load_prompt": json.dumps(prompt, ensure_ascii=False),
        "sources": sources,
        "splits": [("train", results.data.train), ("validation", results.data.validation)],
        "results": results,
        "procedure": [(title, _cell(value)) for title, value in _procedure(results)],
        "by_source": [
            (_cell(_public(label)), measured)
            for label, measured in (results.evaluation.by_source if results.evaluation else {}).items()
        ],
        "tasks": _tasks(results),
        "has_curve": (folder / "loss.png").is_file(),
        "history": _history(folder / METRICS_NAME),
        "samples": samples,
        "limitations": _limitations(config, results, license),
        "recipe": _fence(recipe, "yaml"),
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
            "documents": f"{row.num_documents:,}",
            "shots": str(row.num_fewshot),
        }
        for row in rows
    ]


def _limitations(config: dict[str, Any], results: RunResults, license: str | None) -> list[str]:
    """Only what follows from the record."""
    training, data = results.training, results.data
    names = ", ".join(_cell(_public(source.name)) for source in data.sources)
    per_parameter = training.tokens_seen / results.model.num_parameters
    limits = [
        f"Its run showed it {training.tokens_seen:,} tokens ({per_parameter:.3g} per parameter), all of them from "
        f"{names}.",
        "That run trained it to predict the next token of that text: it continues text, and was not tuned to follow "
        "instructions or to be safe.",
    ]
    if training.epochs > 1:
        limits.append(f"It read its training text {training.epochs:.2f} times.")
    context = config.get("max_position_embeddings", config.get("n_positions"))
    if context is not None:
        limits.append(f"Its positions are made for at most {context:,} tokens.")
    if results.evaluation:
        beside = "Beside the tasks named there, nothing" if results.tasks else "Nothing"
        limits.append(
            f"The measures above are of held-out text from the same sources. {beside} else was measured: neither other "
            "text, nor facts, nor bias."
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


def _render(front_matter: str, context: dict[str, Any]) -> str:
    import jinja2

    path = template_path()

    def refuse_none(value: Any) -> Any:
        if value is None:
            raise UserError(f"{path.name} prints a value that was not measured: make its line conditional")
        return value

    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, finalize=refuse_none)
    try:
        text = environment.from_string(path.read_text(encoding="utf-8")).render(card_data=front_matter, **context)
    except jinja2.TemplateError as error:
        raise UserError(f"{path.name} cannot be filled: {error}; mend the template") from None
    return text + "\n"


def _refuse_holes(value: Any, place: str) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            _refuse_holes(item, f"{place}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _refuse_holes(item, f"{place}[{index}]")
    elif value is None or (isinstance(value, float) and not math.isfinite(value)) or value in ("None", "nan", "NaN"):
        raise UserError(f"the card's {place} is {value}: measure it or drop it")


def _without_fences(text: str) -> str:
    return re.sub(r"^(`{3,})[^`\n]*\n.*?^\1`*[ \t]*$\n?", "", text, flags=re.MULTILINE | re.DOTALL)


def _fence(text: str, language: str = "text") -> str:
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

"""What a model card says of a run: its text, its settings, what was measured and what follows from that."""

import math
from pathlib import Path
from typing import Any

from tercet.hub.card_text import cell, duration, fence, public
from tercet.training.curve import METRICS_NAME, read_metrics
from tercet.training.errors import UserError
from tercet.training.results import RunResults

CURVE_NAME = "loss.png"


def record_context(folder: Path, recipe: str, results: RunResults) -> dict[str, Any]:
    """What the template names of a run, as text that is safe where it stands.

    Args:
        folder: Holds metrics and curve, where they are there.
        recipe: The recipe's text.
        results: Of the run.
    """
    sources = [
        {
            "name": cell(public(source.name)),
            "documents": source.documents,
            "bytes": source.bytes,
            "license": cell(source.license or "not declared"),
            "description": cell(source.description or ""),
        }
        for source in results.data.sources
    ]
    samples = [
        {"prompt": fence(sample.prompt), "text": fence(sample.text), "settings": cell(sample.settings)}
        for sample in results.samples
    ]
    return {
        "sources": sources,
        "splits": [("train", results.data.train), ("validation", results.data.validation)],
        "procedure": [(title, cell(value)) for title, value in _procedure(results)],
        "by_source": [
            (cell(public(label)), measured)
            for label, measured in (results.evaluation.by_source if results.evaluation else {}).items()
        ],
        "texts": [
            {"name": cell(public(text.name)), "context": text.context, "measured": text} for text in results.texts
        ],
        "tasks": _tasks(results),
        "has_curve": (folder / CURVE_NAME).is_file(),
        "history": _history(folder / METRICS_NAME),
        "samples": samples,
        "recipe": fence(recipe, "yaml"),
        "date": results.date.date().isoformat(),
    }


def _procedure(results: RunResults) -> list[tuple[str, str]]:
    training, hardware, versions = results.training, results.hardware, results.versions
    where = hardware.processor if hardware.device == "cpu" else f"{hardware.device}; {hardware.processor}"
    if hardware.num_cores:
        where += f", {hardware.num_cores} cores"
    rows = [
        ("Steps", f"{training.num_steps:,}"),
        ("Tokens seen", f"{training.tokens_seen:,}"),
        ("Epochs", _epochs(results)),
        ("Optimizer", training.optimizer),
        ("Learning rate schedule", training.schedule),
        ("Precision", training.precision),
        ("Training loss at the end (nats per token)", f"{training.final_loss_nats:.4f}"),
        ("Duration", duration(training.duration_s)),
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


def _epochs(results: RunResults) -> str:
    if results.training.epochs is not None:
        return f"{results.training.epochs:.2f}"
    whole = max(results.data.stream.whole_epochs.values(), default=0) if results.data.stream is not None else 0
    return f"a stream, read to its end {whole} times" if whole else "a stream, not read to its end"


def _tasks(results: RunResults) -> list[dict[str, str]]:
    """Rows of the table of tasks."""
    rows = results.tasks.results if results.tasks else []
    return [
        {
            "task": cell(row.task),
            "metric": cell(row.metric if row.filter == "none" else f"{row.metric} ({row.filter})"),
            "value": f"{row.value:.4f}" + ("" if row.standard_error is None else f" ± {row.standard_error:.4f}"),
            "documents": f"{row.num_documents:,}" + ("" if row.limit is None else f" (at most {row.limit:,})"),
            "shots": str(row.num_fewshot),
        }
        for row in rows
    ]


def run_limitations(results: RunResults, *, is_chat: bool) -> list[str]:
    """What follows from how a run trained, and from how little was measured."""
    training, data = results.training, results.data
    names = ", ".join(cell(public(source.name)) for source in data.sources)
    per_parameter = training.tokens_seen / results.model.num_parameters
    limits = [
        f"Its run showed it {training.tokens_seen:,} tokens ({per_parameter:.3g} per parameter), all of them from "
        f"{names}.",
        "That run trained it to answer as the assistant does in those conversations, and not to be right or safe."
        if is_chat
        else "That run trained it to predict the next token of that text: it continues text, and was not tuned to "
        "follow instructions or to be safe.",
    ]
    if data.stream is not None:
        limits.append(
            "Its text was read as a stream: shards in an order drawn at random, their rows as they lie in them, and "
            "what is there twice was read twice."
        )
    if training.epochs is not None and training.epochs > 1:
        limits.append(f"It read its training text {training.epochs:.2f} times.")
    if results.evaluation is None:
        return [*limits, "Nothing was measured on held-out text."]
    others = [*(["the other text"] if results.texts else []), *(["the tasks"] if results.tasks else [])]
    beside = f"Beside {' and '.join(others)} named there, nothing" if others else "Nothing"
    missing = ["neither other text, nor facts", "neither facts"][bool(results.texts)]
    limits.append(
        f"The measures above are of held-out text from the same sources. {beside} else was measured: {missing}, nor "
        "bias."
    )
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

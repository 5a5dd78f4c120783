"""`tercet eval`: bits per byte of held-out or other text, by source; and tasks of others' harness."""

import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerFast

from tercet.hub_checkpoints import local_checkpoint
from tercet.loading import load_checkpoint_folder
from tercet.tokenizer import special_ids, token_ids
from tercet.training.errors import UserError, as_user_error
from tercet.training.evaluation import evaluate
from tercet.training.harness import run_harness
from tercet.training.results import HELD_OUT_TEXT, RESULTS_NAME, Evaluation, RunResults, Tasks, TextEvaluation
from tercet.training.run_folder import DATA_NAME
from tercet.training.shards import prepare
from tercet.training.sources import Source, read_documents
from tercet.training.token_set import PreparedData, TokenSet


def run_eval(checkpoint: Path, data: str | None, sequence_length: int | None, device: str | None) -> None:
    """`tercet eval`."""
    given, checkpoint = checkpoint, local_checkpoint(checkpoint)
    model, tokenizer = load_checkpoint_folder(checkpoint, device)
    with as_user_error(str(checkpoint)):
        ids = token_ids(tokenizer)
    longest = int(getattr(model.config, "max_position_embeddings", 1024))
    uses_own_length = sequence_length in (None, longest)
    sequence_length = sequence_length or min(longest, 1024)
    if sequence_length > longest:
        raise UserError(f"--context {sequence_length} is beyond the model's max_position_embeddings ({longest})")
    with tempfile.TemporaryDirectory() as temporary:
        token_set, is_own_split = _text_to_score(checkpoint, data, tokenizer, Path(temporary))
        _say_beginning(token_set, sequence_length)
        result = evaluate(
            model, token_set, sequence_length=sequence_length, eos_token_id=ids.eos_token_id,
            pad_token_id=ids.pad_token_id, special_ids=special_ids(tokenizer), progress=True,
        )  # fmt: skip
    typer.echo(
        f"{result.bits_per_byte:.4f} bits per byte, {result.loss_nats:.4f} nats per token, "
        f"perplexity {result.perplexity:.2f} on {result.num_bytes:,} bytes, {result.num_tokens:,} tokens"
    )
    _print_sources(result)
    if given != checkpoint:
        return  # a copy in the cache is the Hub's
    if is_own_split and uses_own_length:
        _note(checkpoint, lambda record: {"evaluation": result})
    else:
        _note(checkpoint, lambda record: {"texts": _with_text(record, result, data, sequence_length)})


def _say_beginning(token_set: TokenSet, sequence_length: int) -> None:
    """What takes a while now; a terminal shows a bar of it."""
    if not sys.stderr.isatty():
        typer.echo(
            f"scoring {token_set.num_tokens:,} tokens, {token_set.num_bytes:,} bytes, in windows of {sequence_length}",
            err=True,
        )


def run_tasks(
    checkpoint: Path,
    tasks: str,
    *,
    task_path: Path | None,
    limit: int | None,
    num_fewshot: int | None,
    device: str | None,
) -> None:
    """`tercet eval --tasks`."""
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names:
        raise UserError("--tasks names no task: give one, such as --tasks arc_easy")
    if task_path is not None and not task_path.is_dir():
        raise UserError(f"--task-path {task_path} is no folder")
    given, checkpoint = checkpoint, local_checkpoint(checkpoint)
    model, tokenizer = load_checkpoint_folder(checkpoint, device)
    measured = run_harness(model, tokenizer, names, task_path=task_path, limit=limit, num_fewshot=num_fewshot)
    _print_tasks(measured)
    if given == checkpoint:  # a copy in the cache is the Hub's
        _note(checkpoint, lambda record: {"tasks": measured.beside(record.tasks)})


def _print_tasks(measured: Tasks) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("task", "metric", "value", "±", "documents", "shots"):
        table.add_column(heading, justify="left" if heading in ("task", "metric") else "right")
    for row in measured.results:
        error = "" if row.standard_error is None else f"{row.standard_error:.4f}"
        name = row.metric if row.filter == "none" else f"{row.metric} ({row.filter})"
        table.add_row(row.task, name, f"{row.value:.4f}", error, f"{row.num_documents:,}", str(row.num_fewshot))
    Console().print(table)


def _print_sources(result: Evaluation) -> None:
    width = max(map(len, result.by_source), default=0)
    for label, measured in result.by_source.items():
        typer.echo(
            f"  {label:<{width}}  {measured.bits_per_byte:.4f} bits per byte, {measured.loss_nats:.4f} nats per token "
            f"on {measured.num_bytes:,} bytes, {measured.num_tokens:,} tokens"
        )


def _text_to_score(
    checkpoint: Path, data: str | None, tokenizer: PreTrainedTokenizerFast, temporary: Path
) -> tuple[TokenSet, bool]:
    """The token set, and whether it is the split that the checkpoint's own run held out."""
    if data is None:
        if not (checkpoint / DATA_NAME / "manifest.json").is_file():
            raise UserError(f"{checkpoint} holds no prepared text ({DATA_NAME}/): say what to score with --data")
        return PreparedData.open(checkpoint / DATA_NAME).validation, True
    prepared = prepare(
        read_documents(Source(path=data)), tokenizer, temporary,
        validation_fraction=0.0, split_by="document", drop_duplicates=False, progress=False,
    )  # fmt: skip
    return prepared.train, False


def _with_text(record: RunResults, result: Evaluation, data: str | None, context: int) -> list[TextEvaluation]:
    """The other texts of the record, with this one; measured again in windows of the same length, it is replaced."""
    hub_id = data if data is not None and Source(path=data).is_on_hub() else None
    name = hub_id or (Path(data).name if data is not None else HELD_OUT_TEXT)
    now = datetime.now(UTC).replace(microsecond=0)
    measured = TextEvaluation(**dict(result), name=name, context=context, hub_id=hub_id, date=now)
    return [*(text for text in record.texts if (text.name, text.context) != (name, context)), measured]


def _note(checkpoint: Path, changes: Callable[[RunResults], dict[str, Any]]) -> None:
    """Write into the record of the run what was measured of its result."""
    path = checkpoint / RESULTS_NAME
    if path.is_file():
        record = RunResults.load(path)
        record.model_copy(update=changes(record)).save(path)
        typer.echo(f"noted in {path}; `tercet card {checkpoint}` writes it into the card")

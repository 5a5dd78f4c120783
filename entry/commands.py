"""What the commands do, once torch may be imported."""

import os
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path

import typer
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

from tercet.loading import load_checkpoint_folder
from tercet.tokenizer import token_ids
from tercet.training.errors import UserError, as_user_error
from tercet.training.evaluation import evaluate
from tercet.training.export import check_loads_without_tercet
from tercet.training.pipeline import RunOutcome
from tercet.training.pipeline import train as train_recipe
from tercet.training.recipe import load_recipe
from tercet.training.results import RESULTS_NAME, Evaluation, RunResults
from tercet.training.run_folder import DATA_NAME
from tercet.training.shards import prepare
from tercet.training.sources import Source, read_documents
from tercet.training.token_set import PreparedData, TokenSet

logging.disable_progress_bar()


def run_demo(output: Path | None, steps: int | None, restart: bool) -> None:
    """`tercet demo`."""
    overrides = [] if steps is None else [f"training.num_steps={steps}"]
    recipe = load_recipe("demo", overrides)
    outcome = train_recipe(recipe, output_dir=output, restart=restart, say=typer.echo)
    words = ["tercet", "demo", *(["--steps", steps] if steps else []), *(["--output", output] if output else [])]
    if _report_interruption(outcome, words):
        return
    prompt = recipe.samples.prompts[0]
    check = check_loads_without_tercet(outcome.output_dir, prompt)
    typer.echo(
        f"Check      loads as {check.model_class.rpartition('.')[2]} in a process without Tercet, and generates:"
    )
    for label, text in (("greedy", check.greedy), ("sampled", check.sampled)):
        typer.echo(f"           {label:<8} {_one_line(prompt)}{_one_line(text)}")
    _print_summary(outcome)


def run_train(recipe_name: str, overrides: list[str], output: Path | None, restart: bool) -> None:
    """`tercet train`."""
    recipe = load_recipe(recipe_name, overrides)
    outcome = train_recipe(recipe, output_dir=output, restart=restart, say=typer.echo)
    words = ["tercet", "train", recipe_name, *(word for item in overrides for word in ("--set", item))]
    if not _report_interruption(outcome, words + (["--output", output] if output else [])):
        _print_summary(outcome)


def _report_interruption(outcome: RunOutcome, words: Sequence[object]) -> bool:
    loop = outcome.loop
    if loop is None or loop.interrupted_by is None or not _is_main_process():
        return loop is not None and loop.interrupted_by is not None
    typer.echo(
        f"Stopped by {loop.interrupted_by} after step {loop.state.step} and saved in {loop.checkpoint}; "
        f"to go on: {_command_line(words)}"
    )
    return True


def _command_line(words: Sequence[object]) -> str:
    """The command that began this run, as a shell reads it; under a launcher, the part behind the launcher's own."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        words = ["-m", "tercet.training", *words[2:]]
        return f"the same launcher with {shlex.join(map(str, words))}"
    return shlex.join(map(str, words))


def _print_summary(outcome: RunOutcome) -> None:
    measured, folder = outcome.results, outcome.output_dir
    if measured is None or not _is_main_process():
        return
    training = measured.training
    lines = [
        "",
        f"{folder}: {measured.model.num_parameters:,} parameters, {training.tokens_seen:,} tokens "
        f"({training.epochs:.1f} epochs) in {training.duration_s:.0f} s of training",
    ]
    if measured.evaluation is not None:
        lines.append(
            f"{measured.evaluation.bits_per_byte:.3f} bits per byte on held-out text, "
            f"perplexity {measured.evaluation.perplexity:.1f}"
        )
    for sample in measured.samples[:2]:
        lines += ["", f"  {sample.prompt}{sample.text}".replace("\n", "\n  ")]
    lines += [
        "",
        f"  {folder}/loss.png       the loss curve",
        f"  {folder}/README.md      the model card, filled with what was measured",
        f"  {folder}/metrics.jsonl  every logged step",
        "",
        "Next:",
        f'  tercet generate {folder} "{_one_line(measured.samples[0].prompt.strip()) if measured.samples else "Once"}"',
        f"  tercet info {folder}",
        "  tercet train shakespeare --set data.path=YOUR.txt",
        f'  python -c "from transformers import AutoModelForCausalLM as A; '
        f"A.from_pretrained('{folder}', trust_remote_code=True)\"",
    ]
    typer.echo("\n".join(lines))


def _one_line(text: str) -> str:
    return text.replace("\n", "\\n").replace('"', '\\"')


def _is_main_process() -> bool:
    return os.environ.get("RANK", "0") == "0"


def run_eval(checkpoint: Path, data: str | None, sequence_length: int | None) -> None:
    """`tercet eval`."""
    model, tokenizer = load_checkpoint_folder(checkpoint)
    with as_user_error(str(checkpoint)):
        ids = token_ids(tokenizer)
    longest = int(getattr(model.config, "max_position_embeddings", 1024))
    uses_own_length = sequence_length in (None, longest)
    sequence_length = sequence_length or min(longest, 1024)
    if sequence_length > longest:
        raise UserError(f"--context {sequence_length} is beyond the model's max_position_embeddings ({longest})")
    with tempfile.TemporaryDirectory() as temporary:
        token_set, is_own_split = _text_to_score(checkpoint, data, tokenizer, Path(temporary))
        result = evaluate(
            model, token_set, sequence_length=sequence_length, eos_token_id=ids.eos_token_id,
            pad_token_id=ids.pad_token_id, progress=True,
        )  # fmt: skip
    typer.echo(
        f"{result.bits_per_byte:.4f} bits per byte, {result.loss_nats:.4f} nats per token, "
        f"perplexity {result.perplexity:.2f} on {result.num_bytes:,} bytes, {result.num_tokens:,} tokens"
    )
    if is_own_split and uses_own_length:
        _update_results(checkpoint, result)


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


def _update_results(checkpoint: Path, result: Evaluation) -> None:
    path = checkpoint / RESULTS_NAME
    if path.is_file():
        RunResults.load(path).model_copy(update={"evaluation": result}).save(path)
        typer.echo(f"noted in {path}; `tercet card {checkpoint}` writes it into the card")

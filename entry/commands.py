"""What the commands do, once torch may be imported."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

import typer
from transformers.utils import logging

from tercet.program import program
from tercet.training.checkpoints import step_of
from tercet.training.errors import UserError
from tercet.training.export import check_loads_without_tercet
from tercet.training.pipeline import RunOutcome
from tercet.training.pipeline import train as train_recipe
from tercet.training.recipe import Recipe, load_recipe
from tercet.training.results import RunResults
from tercet.training.run_folder import AnotherRecipeError
from tercet.training.starting_weights import is_chat

logging.disable_progress_bar()

# Evaluations on the way differ by less, up and down.
_WORSE = 1.02


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
    _print_summary(outcome, recipe, first=True)


def run_train(recipe_name: str, overrides: list[str], output: Path | None, restart: bool) -> None:
    """`tercet train`."""
    recipe = load_recipe(recipe_name, overrides)
    words = ["tercet", "train", recipe_name, *(word for item in overrides for word in ("--set", item))]
    try:
        outcome = train_recipe(recipe, output_dir=output, restart=restart, say=typer.echo)
    except AnotherRecipeError as error:
        raise UserError(f"{error}{_branch_line(error, recipe, words, output)}") from error
    if not _report_interruption(outcome, words + (["--output", output] if output else [])):
        _print_summary(outcome, recipe)


def _branch_line(error: AnotherRecipeError, recipe: Recipe, words: Sequence[object], output: Path | None) -> str:
    """How to go on from the run that is there, in a folder of its own, where that is possible."""
    if error.branch_from is None or step_of(error.branch_from) >= recipe.training.num_steps:
        return ""
    folder = f"{output or recipe.output_dir}-to-{recipe.training.num_steps}"
    more = ["--set", f"training.branch_from={error.branch_from}", "--output", folder]
    return f"; or go on from its last checkpoint in a new folder: {_command_line([*words, *more])}"


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


def _print_summary(outcome: RunOutcome, recipe: Recipe, *, first: bool = False) -> None:
    measured, folder = outcome.results, outcome.output_dir
    if measured is None or not _is_main_process():
        return
    training = measured.training
    how_often = "of a stream" if training.epochs is None else f"{training.epochs:.1f} epochs"
    lines = [
        "",
        f"{folder}: {measured.model.num_parameters:,} parameters, {training.tokens_seen:,} tokens "
        f"({how_often}) in {training.duration_s:.0f} s of training",
    ]
    if measured.evaluation is not None:
        lines.append(
            f"{measured.evaluation.bits_per_byte:.3f} bits per byte on held-out text, "
            f"perplexity {measured.evaluation.perplexity:.1f}"
        )
    lines += _past_its_best(outcome)
    for sample in measured.samples[:2]:
        lines += ["", f"  {sample.prompt}{sample.text}".replace("\n", "\n  ")]
    lines += [
        "",
        f"  {folder}/loss.png       the loss curve",
        f"  {folder}/README.md      the model card, filled with what was measured",
        f"  {folder}/metrics.jsonl  every logged step",
        "",
        "Next:",
        *_next_lines(measured, folder, recipe, first=first),
    ]
    typer.echo("\n".join(lines))


def _past_its_best(outcome: RunOutcome) -> list[str]:
    """A line where the held-out text was predicted better long before the end: what follows was learned by heart."""
    measured, loop = outcome.results, outcome.loop
    if measured is None or measured.evaluation is None or loop is None or loop.state.best_bits_per_byte is None:
        return []
    best, step = loop.state.best_bits_per_byte, loop.state.best_step
    if measured.evaluation.bits_per_byte < best * _WORSE:
        return []
    return [
        f"It was better at step {step:,}, {best:.3f} bits per byte, and has learned its text by heart since: "
        f"train on more text, or shorter, with --set training.num_steps={step}"
    ]


def _next_lines(measured: RunResults, folder: Path, recipe: Recipe, *, first: bool) -> list[str]:
    """What to type next, each with what it does.

    Args:
        measured: Of the run that has ended.
        folder: Its folder.
        recipe: Of the run.
        first: Whether this was the demo, and text of the user's own comes next.
    """
    chats = is_chat(recipe)
    place, prompt = shlex.quote(str(folder)), measured.samples[0].prompt.strip() if measured.samples else ""
    words = shlex.quote(prompt.splitlines()[0]) if prompt and not chats else ""
    talk = (f"chat {place}", "talk to it") if chats else (f"generate {place} {words}".strip(), "text from it")
    license = "" if recipe.card.license else "--license NAME "  # without one nothing is published
    look = f"explore {place} --prompt {words}" if words else f"explore {place}"
    lines = [
        talk,
        (look, "see it at work: attention, cache, predictions"),
        (f"info {place}", "its weights and hyperparameters"),
        (f"eval {place} --data FILE", "bits per byte of any text"),
        (f"push {place} USER/NAME {license}--dry-run", "what would be published on the Hub"),
    ]
    if first:
        lines.append(("train text --set data.path=YOUR.txt", "the same with text of your own"))
    commands = [(f"{program()} {command}", purpose) for command, purpose in lines]
    width = min(max(len(command) for command, _ in commands), 60)
    return [f"  {command:<{width}}  # {purpose}" for command, purpose in commands]


def _one_line(text: str) -> str:
    return text.replace("\n", "\\n").replace('"', '\\"')


def _is_main_process() -> bool:
    return os.environ.get("RANK", "0") == "0"

"""What the commands do, once torch may be imported."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

import typer
from transformers.utils import logging

from tercet.training.export import check_loads_without_tercet
from tercet.training.pipeline import RunOutcome
from tercet.training.pipeline import train as train_recipe
from tercet.training.recipe import load_recipe
from tercet.training.results import RunResults
from tercet.training.starting_weights import is_chat

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
        _print_summary(outcome, chats=is_chat(recipe))


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


def _print_summary(outcome: RunOutcome, *, chats: bool = False) -> None:
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
        f"  tercet chat {folder}" if chats else f'  tercet generate {folder} "{_first_prompt(measured)}"',
        f"  tercet info {folder}",
        "  tercet train shakespeare --set data.path=YOUR.txt",
        f'  python -c "from transformers import AutoModelForCausalLM as A; '
        f"A.from_pretrained('{folder}', trust_remote_code=True)\"",
    ]
    typer.echo("\n".join(lines))


def _first_prompt(measured: RunResults) -> str:
    return _one_line(measured.samples[0].prompt.strip()) if measured.samples else "Once"


def _one_line(text: str) -> str:
    return text.replace("\n", "\\n").replace('"', '\\"')


def _is_main_process() -> bool:
    return os.environ.get("RANK", "0") == "0"

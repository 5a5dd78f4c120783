"""`tercet explore`, once torch may be imported."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tercet.explorer.files import load_trace, save_trace
from tercet.explorer.record import Sampling, Trace
from tercet.explorer.render import render
from tercet.explorer.server import RUN_PATH, ExplorerServer
from tercet.explorer.trace import trace
from tercet.explorer.words import sentence
from tercet.loading import check_device, check_is_causal_lm, load_checkpoint_folder
from tercet.training.atomic import write_atomically
from tercet.training.errors import UserError
from tercet.training.hardware import free_memory_bytes
from tercet.units import binary_bytes

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True)
class Run:
    """What the user asked for; a temperature of 0 takes the likeliest token each time."""

    checkpoint: Path
    name: str
    prompt: str
    new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float
    seed: int
    device: str

    @property
    def sampling(self) -> Sampling | None:
        """As the record has it."""
        if self.temperature == 0:
            return None
        return Sampling(self.temperature, self.top_k, self.top_p, self.seed)


def run_explore(run: Run, output: Path, trace_folder: Path | None) -> None:
    """Write the page, and what was recorded into `trace_folder`."""
    check_page_path(output)
    if not run.prompt:
        raise UserError("the prompt is empty: give a text to look at")
    with _progress() as step:
        model, tokenizer = _load(run, step)
        recorded = _trace(run, model, tokenizer, run.prompt, run.new_tokens, step)
        if trace_folder is not None:
            save_trace(recorded, trace_folder)
        step("drawing the page")
        _write_page(recorded, output)
    _report(recorded, output)
    if trace_folder is not None:
        typer.echo(f"{trace_folder}: what was recorded; --from-trace {trace_folder} makes the page again")


def run_from_trace(trace_folder: Path, output: Path) -> None:
    """Write the page of an earlier run."""
    check_page_path(output)
    recorded = load_trace(trace_folder)
    _write_page(recorded, output)
    _report(recorded, output)


def run_serve(run: Run, port: int) -> None:
    """Serve the page until Ctrl-C."""

    def make_page(prompt: str, new_tokens: int, step: Callable[[str], None]) -> str:
        return render(_trace(run, model, tokenizer, prompt, new_tokens, step), form_action=RUN_PATH)

    try:
        # The port is taken before minutes of work; who asks now is answered after them.
        server = ExplorerServer(port, "", make_page, run.new_tokens)
    except OSError as error:
        raise UserError(
            f"port {port} cannot be used ({error.strerror}): choose another, or 0 for a free one"
        ) from error
    with server:
        with _progress() as step:
            model, tokenizer = _load(run, step)
            server.page = make_page(run.prompt, run.new_tokens, step)
        typer.echo(f"{server.url} shows the page; Ctrl-C ends")
        server.serve_until_interrupted()
    typer.echo("stopped")


def check_page_path(output: Path) -> None:
    """Refuse a page that could not be written, before minutes of work.

    Raises:
        UserError: Names the place and the remedy.
    """
    if output.is_dir():
        raise UserError(f"{output} is a folder: give the name of a file, such as {output / 'page.html'}")
    folder = output.parent
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder} for the page: make it, or write elsewhere with --output")
    if not os.access(folder, os.W_OK):
        raise UserError(f"{folder} cannot be written: choose another place with --output")


def check_fits(folder: Path, device: str) -> None:
    """Refuse weights that are larger than the free memory, which would end in a killed process.

    Raises:
        UserError: Names both sizes.
    """
    needed = sum(file.stat().st_size for file in weight_files(folder))
    for place in dict.fromkeys(("cpu", device)):
        free = free_memory_bytes(place)
        if needed > free:
            raise UserError(
                f"the weights in {folder} take {binary_bytes(needed)}, and {binary_bytes(free)} of memory are free on "
                f"{place}: choose a smaller checkpoint, or a machine with more memory"
            )


def weight_files(folder: Path) -> list[Path]:
    """The files that from_pretrained would read, of the format that it prefers."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return [folder / name]
        if index.is_file():
            try:
                names = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
            except (ValueError, KeyError, AttributeError) as error:
                raise UserError(f"{index} is damaged: get the checkpoint again") from error
            return [folder / name for name in sorted(names) if (folder / name).is_file()]
    return []


def _load(run: Run, step: Callable[[str], None]) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    check_is_causal_lm(run.checkpoint)
    check_device(run.device)
    check_fits(run.checkpoint, run.device)
    if not any((run.checkpoint / name).is_file() for name in _TOKENIZER_FILES):
        # transformers makes an empty one from the model's config alone.
        raise UserError(f"{run.checkpoint} has no tokenizer: put the files of the one it was trained with into it")
    step("loading the model")
    return load_checkpoint_folder(run.checkpoint, run.device)


def _trace(
    run: Run,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    prompt: str,
    new_tokens: int,
    step: Callable[[str], None],
) -> Trace:
    return trace(model, tokenizer, prompt, new_tokens=new_tokens, sampling=run.sampling, name=run.name, step=step)


def _write_page(recorded: Trace, output: Path) -> None:
    content = render(recorded).encode()
    try:
        write_atomically(output, content)
    except (PermissionError, IsADirectoryError, FileNotFoundError) as error:
        raise UserError(f"{output} cannot be written ({error.strerror}): choose another place") from error


def _report(recorded: Trace, output: Path) -> None:
    num_new = len(recorded.tokens) - recorded.num_prompt_tokens
    for left_out in recorded.left_out:
        reason = sentence("page", f"reason.{left_out.reason}", left_out.values)
        typer.echo(f"note: {left_out.part}: {reason}", err=True)
    typer.echo(
        f"{output}: {binary_bytes(output.stat().st_size)}, {recorded.num_prompt_tokens} + {num_new} tokens through "
        f"{recorded.model.num_layers} layers; open it in any browser"
    )


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """One line that says what is done now, gone in the end; nothing where nobody looks at a terminal."""
    with Console(stderr=True).status("starting") as status:

        def step(line: str) -> None:
            if line:
                status.update(f"{line} ...")

        yield step

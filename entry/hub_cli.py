"""`tercet card` and `tercet push`: the model card, and the checkpoint on the Hub."""

import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from tercet.command_line import Checkpoint, one_line
from tercet.training.errors import UserError
from tercet.units import decimal_bytes

if TYPE_CHECKING:
    from tercet.hub import PushOptions

_STOP_S = 2.0
License = Annotated[str | None, typer.Option(help="Licence of the weights, such as apache-2.0.")]


@one_line
def card(
    checkpoint: Checkpoint,
    repo_id: Annotated[str | None, typer.Option(help="Hub repository that readers will load from.")] = None,
    license: License = None,
) -> None:
    """Write the model card, filled with what the run measured."""
    from tercet.hub import write_card

    typer.echo(f"wrote {write_card(checkpoint, repo_id=repo_id, license=license)}")


@one_line
def push(
    checkpoint: Checkpoint,
    repository: Annotated[str, typer.Argument(help="Repository on the Hub: user/name.", metavar="REPO")],
    private: Annotated[
        bool | None,
        typer.Option("--private/--public", help="Who may see a new repository; the Hub's default is public."),
    ] = None,
    branch: Annotated[str, typer.Option(help="Branch to push to, made from main if it is not there.")] = "main",
    tag: Annotated[str | None, typer.Option(metavar="NAME", help="Tag for the commit.")] = None,
    tag_step: Annotated[bool, typer.Option("--tag-step", help="Tag the commit step-N, N the steps trained.")] = False,
    message: Annotated[
        str | None, typer.Option("--message", "-m", help="Of the commit; default: step and bits per byte.")
    ] = None,
    license: License = None,
    export: Annotated[
        str | None,
        typer.Option(
            metavar="FAMILY",
            help="Publish the weights as a native model, which needs no custom code: llama, mistral, qwen2, qwen3, "
            "smollm3 or gpt2.",
        ),
    ] = None,
    beside: Annotated[
        bool, typer.Option("--beside", help="Put the export into FAMILY/ beside the checkpoint, not in its place.")
    ] = False,
    include: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help="A further file of the folder, or a pattern; repeatable.")
    ] = None,
    shorten_paths: Annotated[
        bool, typer.Option("--shorten-paths", help="Publish absolute paths in recipe and results as their last part.")
    ] = False,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="Publish TEXT though it looks like a secret or a path, or is the name of a scored file; repeatable.",
        ),
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Put the model in the place of whatever else the repository holds.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List files and sizes and stop; needs no network and no token.")
    ] = False,
) -> None:
    """Publish a checkpoint on the Hub: card, code, weights, tokenizer, curve and recipe, as one commit.

    Nothing is published that holds a secret or an absolute path. Cut off, the same command goes on where it was.
    """
    from tercet.hub import PushOptions

    options = PushOptions(
        repository, branch=branch, private=private, tag=tag, tag_step=tag_step, message=message, license=license,
        export=export, beside=beside, include=tuple(include or ()), allow=tuple(allow or ()),
        shorten_paths=shorten_paths, replace=replace,
    )  # fmt: skip
    if export is not None:
        from transformers.utils import logging

        logging.disable_progress_bar()
    if dry_run:
        _show_plan(checkpoint, options)
    else:
        _push(checkpoint, options)


def _push(checkpoint: Path, options: "PushOptions") -> None:
    from huggingface_hub.utils import disable_progress_bars

    from tercet.hub import push_checkpoint
    from tercet.hub.retries import use_bounded_waits

    use_bounded_waits()
    if not sys.stderr.isatty():
        disable_progress_bars()
    with _ends_when_told():
        report = push_checkpoint(checkpoint, options, say=typer.echo)
    facts = [f"commit {report.commit[:8]}", *(f"tag {tag}" for tag in report.tags)]
    facts.append("private" if report.private else "public")
    if not report.is_new:
        facts.append("nothing to send: all of it was there")
    typer.echo("\n".join([f"{report.url}  ({', '.join(facts)})", "", *report.loading]))


@contextmanager
def _ends_when_told() -> Iterator[None]:
    """Ctrl-C ends the command within seconds: huggingface_hub would first finish the files that are under way."""
    workspace = tempfile.mkdtemp(prefix="tercet-push-")
    timers: list[threading.Timer] = []

    def leave() -> None:
        shutil.rmtree(workspace, ignore_errors=True)
        typer.echo("tercet: stopped; what was finished is kept, and the same command goes on with it", err=True)
        os._exit(2)

    def stop(number: int, frame: FrameType | None) -> None:
        timers.append(threading.Timer(_STOP_S, leave))
        timers[-1].daemon = True
        timers[-1].start()
        raise KeyboardInterrupt

    previous, before = tempfile.tempdir, signal.signal(signal.SIGINT, stop)
    tempfile.tempdir = workspace  # so that `leave` knows what to remove
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()
        signal.signal(signal.SIGINT, before)
        tempfile.tempdir = previous
        shutil.rmtree(workspace, ignore_errors=True)


def _show_plan(checkpoint: Path, options: "PushOptions") -> None:
    from tercet.hub.push import plan_push

    files, refusal = plan_push(checkpoint, options)
    width = max(len(file.path) for file, _ in files)
    for file, size in files:
        typer.echo(f"{decimal_bytes(size):>9}  {file.path:<{width}}  {file.what}")
    total = decimal_bytes(sum(size for _, size in files))
    typer.echo(f"{total:>9}  {len(files)} files for {options.repo_id}, branch {options.branch}; nothing was sent")
    if refusal is not None:
        raise UserError(refusal)

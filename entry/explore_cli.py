"""`tercet explore`: its arguments; the work is in `explore_commands.py`."""

from pathlib import Path
from typing import Annotated

import typer

from tercet.command_line import one_line, one_prompt
from tercet.training.errors import UserError

DEFAULT_PROMPT = "The cat sat on the mat. The cat"
DEFAULT_PAGE = Path("page.html")


@one_line
def explore(
    checkpoint: Annotated[
        Path | None,
        typer.Argument(help="A folder that from_pretrained loads, or the name of a model on the Hub.", metavar="CKPT"),
    ] = None,
    text: Annotated[str | None, typer.Argument(help="The same as --prompt.", metavar="PROMPT")] = None,
    prompt: Annotated[
        str | None, typer.Option(help="Text to look at and to continue; a sentence that repeats itself if not given.")
    ] = None,
    new_tokens: Annotated[int, typer.Option(min=1, help="How many tokens follow.")] = 16,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help=f"Page to write; {DEFAULT_PAGE} if not given.")
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve the page on 127.0.0.1, with a box for the prompt, until Ctrl-C.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="For --serve; 0 takes a free one.")] = 0,
    save_trace: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep what was recorded, as JSON and safetensors.")
    ] = None,
    from_trace: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Make the page of what --save-trace kept; no model is run.")
    ] = None,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0 takes the likeliest token each time; above, tokens are drawn.")
    ] = 0.0,
    top_k: Annotated[int | None, typer.Option(min=1, help="Draw among so many of the likeliest tokens.")] = None,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Draw among those that have this probability.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Same seed, same tokens.")] = 0,
    device: Annotated[str, typer.Option(help="Where the model runs, such as cpu or cuda.")] = "cpu",
) -> None:
    """See a model at work on a text, on one page that any browser opens: tokens, attention, cache, MLP, predictions."""
    prompt = one_prompt(text, prompt)
    if (checkpoint is None) == (from_trace is None):
        raise UserError("give a checkpoint folder, or --from-trace and a folder that --save-trace wrote")
    if from_trace is not None and (serve or save_trace is not None or prompt is not None):
        raise UserError(
            "--from-trace makes the page of an earlier run: --serve, --save-trace and --prompt need a model"
        )
    if serve and (output is not None or save_trace is not None):
        raise UserError("--serve writes no files: leave out --output and --save-trace")
    if temperature == 0 and (top_k is not None or top_p < 1):
        raise UserError("--top-k and --top-p choose what tokens are drawn from: give a --temperature above 0, too")
    from tercet.explore_commands import Run, run_explore, run_from_trace, run_serve
    from tercet.hub_checkpoints import local_checkpoint

    if from_trace is not None:
        run_from_trace(from_trace, output or DEFAULT_PAGE)
        return
    assert checkpoint is not None
    folder = local_checkpoint(checkpoint)
    name = folder.resolve().name if folder == checkpoint else str(checkpoint)
    run = Run(
        folder, name, DEFAULT_PROMPT if prompt is None else prompt, new_tokens, temperature, top_k, top_p, seed, device
    )
    if serve:
        run_serve(run, port)
    else:
        run_explore(run, output or DEFAULT_PAGE, save_trace)
